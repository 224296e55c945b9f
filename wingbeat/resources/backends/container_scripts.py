"""What runs inside a container to make it a box: POSIX shell, as images have it.

Neither Docker nor Kubernetes can end a command that it began, close its standard input everywhere, or copy files into
a folder in memory, so all of that is done from inside.  An image needs ``sh``, ``env``, ``cat``, ``head``, ``tar``,
``mkdir``, ``mkfifo``, ``mv``, ``rm``, ``readlink``, ``wc``, ``grep`` and ``sleep``, be they GNU's or busybox.
"""

from __future__ import annotations

MARK = "wingbeat-box"
"""In the arguments of the container's first process."""
RUN_VARIABLE = "WINGBEAT_RUN"
"""In the environment of all that a command starts: how it is found again."""
NUM_HELPERS = 8
"""Processes of our own beside a command, at most."""

FIRST = 'while :; do sleep 3600 & wait "$!"; done'
"""The first process: it waits, and takes up the dead."""

RUN = """
size=$1; fifos=/tmp/.wingbeat-$2; shift 2
cd -- "$1" || exit 125
shift
mkdir -- "$fifos" && mkfifo "$fifos/o" "$fifos/e" || exit 125
cat "$fifos/o" & out=$!
cat "$fifos/e" >&2 & err=$!
exec 2>/dev/null
if [ "$size" = 0 ]; then
    (exec "$@") </dev/null >"$fifos/o" 2>"$fifos/e"
else
    mkfifo "$fifos/i" || exit 125
    exec 3<&0
    head -c "$size" <&3 >"$fifos/i" &
    (exec "$@" 3<&-) <"$fifos/i" >"$fifos/o" 2>"$fifos/e"
fi
code=$?
rm -rf -- "$fifos"
(trap 'kill "$nap"; exit 0' TERM; sleep 1 & nap=$!; wait "$nap"; kill -9 "$out" "$err") </dev/null >/dev/null &
late=$!
wait "$out"; wait "$err"
kill "$late"
exit "$code"
"""
"""``SIZE ID FOLDER COMMAND...``: SIZE bytes of standard input, then its end.

What the command leaves in the background may hold its outputs open for ever: it is waited for a second at most, to
empty what is on its way.  The command runs in the foreground, since a shell has what it runs in the background ignore
interrupts.
"""

END_RUN = """
rm -rf -- "/tmp/.wingbeat-$1"
left=1 round=0
while [ "$left" = 1 ] && [ "$round" -lt 50 ]; do
    left=0 round=$((round + 1))
    for process in /proc/[0-9]*; do
        if grep -qs "WINGBEAT_RUN=$1" "$process/environ"; then kill -9 "${process#/proc/}" 2>/dev/null && left=1; fi
    done
done
exit 0
"""
"""``ID``: end a command and all that it started, until nothing of it is found."""

END_ALL = f"""
grep -qs {MARK} /proc/1/cmdline || exit 97
kill -9 -1
exit 0
"""
"""End every process but the container's first one, which the kernel leaves out, and this one."""

UNPACK = """
cd -- "$2" && head -c "$1" | tar -xf -
"""
"""``SIZE FOLDER``: files as they are at the start."""

OUTSIDE, MISSING, NO_FOLDER, IS_FOLDER, NO_FILE, FULL = 91, 92, 93, 94, 95, 96
"""How :data:`FILES` says what is wrong with a path."""

FILES = f"""
verb=$1 rest=$3 number=$4
unset CDPATH
cd -P -- "$2" || exit 98
root=$(pwd -P)
case $root in /) root= ;; esac
inside() {{ case "$(pwd -P)/" in "$root"/*) ;; *) exit {OUTSIDE} ;; esac; }}
enter() {{
    if [ "$verb" = write ] && ! [ -e "$1" ] && ! [ -L "$1" ]; then mkdir -- "$1" || exit {FULL}; fi
    [ -e "$1" ] || exit {MISSING}
    [ -d "$1" ] || exit {NO_FOLDER}
    cd -P -- "$1" || exit {NO_FOLDER}
    inside
}}
while :; do
    case $rest in */*) enter "./${{rest%%/*}}"; rest=${{rest#*/}} ;; *) break ;; esac
done
name=./$rest
case $verb in
write)
    if [ -d "$name" ] && ! [ -L "$name" ]; then exit {IS_FOLDER}; fi
    new=./.wingbeat-$$
    head -c "$number" >"$new" && [ "$(wc -c <"$new")" -eq "$number" ] || {{ rm -f -- "$new"; exit {FULL}; }}
    if [ -L "$name" ]; then rm -f -- "$name"; fi
    mv -f -- "$new" "$name" || {{ rm -f -- "$new"; exit {FULL}; }}
    ;;
read)
    full=$(readlink -f -- "$name") || exit {MISSING}
    case $full in "$root" | "$root"/*) ;; *) exit {OUTSIDE} ;; esac
    [ -e "$full" ] || exit {MISSING}
    if [ -d "$full" ]; then exit {IS_FOLDER}; fi
    [ -f "$full" ] || exit {NO_FILE}
    head -c "$number" <"$full" || exit {FULL}
    ;;
enter)
    enter "$name"
    pwd -P
    ;;
list)
    enter "$name"
    for name in * .[!.]* ..?*; do
        if [ -d "$name" ] && ! [ -L "$name" ]; then
            printf '%s/\\0' "$name"
        elif [ -e "$name" ] || [ -L "$name" ]; then
            printf '%s\\0' "$name"
        fi
    done
    ;;
esac
"""
"""``VERB WORKDIR PATH NUMBER``: one operation on a path that must stay in the folder, link by link.

``write`` replaces what has the name, a link included, and never writes through one.
"""

CHECK = """
for tool in env cat head tar mkdir mkfifo mv rm readlink wc grep sleep; do
    command -v "$tool" >/dev/null || { echo "the image lacks $tool"; exit 1; }
done
cd -- "$1" && : >.wingbeat-check && rm .wingbeat-check || { echo "$1 cannot be written"; exit 1; }
"""
"""``WORKDIR``: whether this can be a box; says what is missing."""
