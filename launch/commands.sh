# Functions shared by the launch scripts, which source this file. Compatible with bash 3.2 (macOS) and newer.

# Print an error of one sentence and exit with 2, the code of user errors.
fail() {
  echo "error: $1" >&2
  exit 2
}

# Print the words quoted for a shell; in --flag=value, only the value is quoted.
quoted() {
  local word flag line="" apostrophe="'" escaped="'\\''"
  for word in "$@"; do
    flag=""
    case "$word" in
      *[!A-Za-z0-9_./:=@%+,-]* | "")
        [[ ! "$word" =~ ^--[a-z-]+= ]] || flag="${BASH_REMATCH[0]}"
        word="${word#"$flag"}"
        word="$flag'${word//$apostrophe/$escaped}'"
        ;;
    esac
    line="$line $word"
  done
  printf '%s\n' "${line# }"
}

# Run a command, or only print it if $flag_dry_run is set.
call() {
  if [ -n "${flag_dry_run:-}" ]; then
    quoted "$@"
  else
    "$@"
  fi
}

# need TOOL SOURCE: fail if the tool is not installed, and say where to get it.
need() {
  [ -n "${flag_dry_run:-}" ] || command -v "$1" > /dev/null || fail "$1 is not on the PATH; install $2"
}

# read_command ACTIONS VALUES SWITCHES WORD...
#
# Fill the array `actions`, $flag_NAME for each --NAME=VALUE and --SWITCH, and the array `program` with all words after
# "--". With --help, print the comment at the head of the script.
read_command() {
  local known_actions=" $1 " known_values=" $2 " known_switches=" $3 " word key
  shift 3
  actions=() program=()
  while [ $# -gt 0 ]; do
    word="$1"
    shift
    key="${word%%=*}"
    key="${key#--}"
    case "$word" in
      --) program=("$@") && break ;;
      --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit 0 ;;
      --*=*)
        [[ "$known_values" == *" $key "* ]] || fail "$0 has no flag --$key; see --help"
        [ -n "${word#*=}" ] || fail "--$key has no value; write --$key=VALUE or leave it out"
        printf -v "flag_${key//-/_}" %s "${word#*=}"
        ;;
      --*)
        [[ "$known_values" != *" $key "* ]] || fail "--$key has no value; write --$key=VALUE"
        [[ "$known_switches" == *" $key "* ]] || fail "$0 has no flag --$key; see --help"
        printf -v "flag_${key//-/_}" %s yes
        ;;
      *)
        [[ "$known_actions" == *" $word "* ]] || fail "$0 has no action \"$word\"; choose from:${known_actions% }"
        actions+=("$word")
        ;;
    esac
  done
  [ ${#actions[@]} -gt 0 ] || fail "no action is given; choose from:${known_actions% }, or see --help"
}

# require_form NAME REGEX EXAMPLE: fail unless the flag --NAME is given and matches the regular expression.
require_form() {
  local variable="flag_${1//-/_}"
  [ -n "${!variable:-}" ] || fail "--$1 is missing; for example, write --$1=$3"
  [[ "${!variable}" =~ ^($2)$ ]] || fail "--$1=${!variable} is not valid; for example, write --$1=$3"
}

# Ask for confirmation, unless --yes is given.
agree() {
  local answer=""
  [ -z "${flag_yes:-}${flag_dry_run:-}" ] || return 0
  read -r -p "$1 [y/N] " answer || true
  [ "$answer" = y ] || fail "nothing was deleted; answer y, or pass --yes"
}

# Return the exit code of a background process. A trap interrupts `wait` before the process ends, so wait again.
wait_for() {
  while wait "$1" || true; kill -0 "$1" 2> /dev/null; do :; done
  wait "$1"
}

# writes_parts FLAG...: whether these are the flags of a command that writes parts, whose workers do not wait for one
# another. Several processes of `predict` write nothing else.
writes_parts() {
  case "${1:-}: $*" in
    predict:* | features:*" --images="*) ;;
    *) return 1 ;;
  esac
}
