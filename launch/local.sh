#!/usr/bin/env bash
# Train ML-VPT on the embedded data set on this machine: set up an environment, train, print the metrics.
#
#   bash launch/local.sh                                # configs/mlvpt_digits.py into runs/digits
#   bash launch/local.sh --config.train.epochs=2        # accepts all flags of mlmoe_jax.main
#   bash launch/local.sh --mode=report                  # another mode, on the same run
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh
use_environment

arguments=("$@")
case " $* " in
  *" --config="* | *" --config "* | *" --sweep=config="* | *" --sweep config="*) ;;
  *" --mode=train "* | *" --mode train "*) arguments+=(--config=configs/mlvpt_digits.py) ;;
  *" --mode="* | *" --mode "*) ;; # the config is in the run folder
  *) arguments+=(--config=configs/mlvpt_digits.py) ;;
esac
if [[ ! " $* " =~ \ --(workdir[= ]|mode[= ](compile|data|features|pack|summary)\ ) ]]; then
  arguments+=(--workdir=runs/digits) # the modes above have no run folder
fi
exec "$python_in_environment" -m mlmoe_jax.main "${arguments[@]}"
