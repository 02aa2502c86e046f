"""Variables of the environment that glibc and XLA read when a process starts.

This module imports no library, because `use_large_pages` may restart the program, which would import it twice.
"""

import os
import sys
from pathlib import Path

PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
TUNABLES = "GLIBC_TUNABLES"
LARGE_PAGES = ":".join(
    (
        "glibc.malloc.hugetlb=1",
        "glibc.malloc.mmap_threshold=16777216",
        "glibc.malloc.trim_threshold=67108864",
    )
)
FLAGS = "XLA_FLAGS"
WIDE_VECTORS = "--xla_cpu_prefer_vector_width=512"


def set_environment() -> None:
    """Set XLA_FLAGS, and restart this process with GLIBC_TUNABLES under the conditions of `use_large_pages`."""
    os.environ[FLAGS] = add_wide_vectors(os.environ.get(FLAGS, ""))
    use_large_pages()


def add_wide_vectors(flags: str) -> str:
    """Return `flags` and a flag with which XLA uses vectors of 512 bits, instead of 256, on a CPU that has them.

    `flags` is the value of XLA_FLAGS, which XLA reads at its first program. Flags that already set the width are
    returned unchanged. Wide vectors speed up GELU, normalizations and depthwise convolutions, but not matmuls. All
    gradients of ConvNeXt-T take 0.8 of the time, and a training step of DR-MoE on ResNet-101 takes 0.92.
    """
    return flags if WIDE_VECTORS.split("=")[0] in flags else f"{flags} {WIDE_VECTORS}".strip()


def use_large_pages() -> None:
    """Restart this process with transparent huge pages for large arrays, if the system provides them only on request.

    On a CPU, XLA returns its temporary arrays to the system after each step. With small pages, a third of the time of a
    training step can be page faults.

    GLIBC_TUNABLES also sets two thresholds of malloc. A freed block of at least 16 MiB is returned to the system. By
    default, malloc keeps freed blocks of up to 32 MiB, and matmuls in bfloat16 free many such blocks. The end of the
    heap is returned if 64 MiB of it are free. This is the default, but glibc uses 128 KiB if only the first threshold
    is set.

    The restart is needed because glibc reads the environment variable GLIBC_TUNABLES only when a process starts. Worker
    processes inherit the variable. Nothing happens if GLIBC_TUNABLES is set already, or in a notebook or a debugger.
    """
    arguments = sys.argv[1:]
    is_own_process = sys.gettrace() is None and bool(arguments) and sys.orig_argv[-len(arguments) :] == arguments
    if TUNABLES not in os.environ and is_own_process and PAGES.is_file() and "[madvise]" in PAGES.read_text():
        os.environ[TUNABLES] = LARGE_PAGES
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
