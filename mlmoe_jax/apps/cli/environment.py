"""The variable of the environment that glibc reads when a process starts.

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
