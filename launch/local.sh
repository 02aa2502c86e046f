#!/usr/bin/env bash
# The main job on this machine: set up, train ML-VPT on the embedded data set, print the metrics.
#
#   bash launch/local.sh                                # configs/mlvpt_digits.py into runs/digits
#   bash launch/local.sh --config.train.epochs=2        # any flag of mlmoe_jax.main may follow
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh
use_environment

# Large pages for large arrays: training on a CPU gains about a fifth. What is no glibc takes no notice.
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"

arguments=("$@")
case " $* " in *" --config="* | *" --config "*) ;; *) arguments+=(--config=configs/mlvpt_digits.py) ;; esac
case " $* " in *" --workdir="* | *" --workdir "*) ;; *) arguments+=(--workdir=runs/digits) ;; esac
exec "$python_in_environment" -m mlmoe_jax.main "${arguments[@]}"
