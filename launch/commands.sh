# What the launch scripts share; sourced by them. Runs in bash 3.2, which macOS has, and newer.

# One sentence, and the exit code of everything that the user can put right.
fail() {
  echo "error: $1" >&2
  exit 2
}

# The words as a shell would have to be given them; of --flag=value only the value is quoted.
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

# Run a command, or only print it where $flag_dry_run is set.
call() {
  if [ -n "${flag_dry_run:-}" ]; then
    quoted "$@"
  else
    "$@"
  fi
}

# A tool that the commands need, and where it comes from.
need() {
  [ -n "${flag_dry_run:-}" ] || command -v "$1" > /dev/null || fail "$1 is not on the path; install $2"
}

# read_command ACTIONS VALUES SWITCHES WORD...
#
# Fill the array `actions`; $flag_NAME for each --NAME=VALUE and --SWITCH; and the array `program` with all after "--".
# Without any words, and with --help, print the comment at the head of the script.
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
        [[ "$known_actions" == *" $word "* ]] || fail "$0 does not know \"$word\"; it knows:${known_actions% }"
        actions+=("$word")
        ;;
    esac
  done
  [ ${#actions[@]} -gt 0 ] || fail "say what to do:${known_actions% }; see --help"
}

# require_form NAME REGEX EXAMPLE: the flag --NAME is given and looks as it should.
require_form() {
  local variable="flag_${1//-/_}"
  [ -n "${!variable:-}" ] || fail "--$1 is missing; write for example --$1=$3"
  [[ "${!variable}" =~ ^($2)$ ]] || fail "--$1=${!variable} is not of the right form; write for example --$1=$3"
}

# What a person has to agree to, unless --yes is given.
agree() {
  local answer=""
  [ -z "${flag_yes:-}${flag_dry_run:-}" ] || return 0
  read -r -p "$1 [y/N] " answer || true
  [ "$answer" = y ] || fail "nothing was deleted; answer y, or give --yes"
}

# The exit code of a process in the background. A trap ends `wait` before the process does, so it is asked again.
wait_for() {
  while wait "$1" || true; kill -0 "$1" 2> /dev/null; do :; done
  wait "$1"
}
