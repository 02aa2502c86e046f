#!/usr/bin/env bash
# Prove on a GPU or a TPU what the documentation says, in at most 40 minutes: numbers, speed and memory on one page.
#
#   bash launch/prove.sh                                     # writes runs/proof/proof.md and proof.json
#   bash launch/prove.sh --short                             # tiny sizes, minutes on a CPU: does everything run?
#   bash launch/prove.sh --minutes=10 --parts=agreement,step,mfu,memory,attention,data --peer=PYTHON
#   bash launch/prove.sh --voc2007=ROOT                      # also three rows of ML-VPT, table 2
#   bash launch/prove.sh --coco=ROOT --checkpoint=FILE       # also the authors' checkpoint on val2014
#   bash launch/prove.sh --photos=ROOT --names=FILE          # also zero-shot mAP on VOC 2007, by a list of its labels
#   bash launch/prove.sh --help                              # all flags
#
# Rerun it to continue. The first run sets up an environment, which needs the network. Set PYTHON if the
# PATH has no Python 3.11 or newer, as on TPU VMs.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh

extra=""
if [ -e /dev/accel0 ] || [ -e /dev/vfio/0 ]; then
  extra=tpu
elif command -v nvidia-smi > /dev/null; then
  extra=cuda
fi
use_environment "$extra"
# The extra tpu has gcsfs. Without it, one row of the suite `overhead` is left out.
"$python_in_environment" -c 'import gcsfs' 2> /dev/null ||
  "$python_in_environment" -m pip install --quiet --disable-pip-version-check gcsfs ||
  echo "without gcsfs, nothing is measured with an object store" >&2
exec "$python_in_environment" -m benchmarks.prove "$@"
