"""`normrnn --completion`: words for the tab key, in bash and zsh."""

from normrnn.cli import COMMANDS
from normrnn.recipes import RECIPES

_SCRIPT = """\
[ -n "$ZSH_VERSION" ] && autoload -U +X bashcompinit && bashcompinit
_normrnn() {
  local word="${COMP_WORDS[COMP_CWORD]}" second="${COMP_WORDS[2]}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="COMMANDS"
  elif [ "${word#-}" != "$word" ]; then
    [ "${second#-}" != "$second" ] && second=""
    words="$(normrnn "${COMP_WORDS[1]}" ${second:+"$second"} --help 2>/dev/null |
      grep -oE -e '--[a-z][a-z.-]*' | sort -u)"
  elif [ "$COMP_CWORD" -eq 2 ]; then
    case "${COMP_WORDS[1]}" in train|compare|search|gradients) words="RECIPES";; esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _normrnn normrnn"""


def script() -> str:
    """Return shell code that completes commands, recipes and options; elsewhere file names."""
    return _SCRIPT.replace("COMMANDS", " ".join(COMMANDS)).replace("RECIPES", " ".join(RECIPES))
