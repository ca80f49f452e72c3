#!/bin/bash
# Runs the ranks of a multinode_run to their end, and again where they ask for it:
#   job.sh NAME RUNS RANKS MAX_RESTARTS LAUNCHER-COMMAND...
# LAUNCHER-COMMAND ends with rank.sh and the program. RUNS is a directory that all nodes see; in it is
# made, and at the end removed, one of this run, LOCKSTEP_RUN.
#
# Exit status: 0 if all ranks ended with 0, whatever srun or mpirun say; else that of the first rank
# that failed. 75 (kExitToBeContinued of parallel/checkpoint) means: saved and stopped, start me again.
# That is done MAX_RESTARTS times, in the same job, or where Slurm stopped a batch job (time limit) by putting it back into the
# queue. LOCKSTEP_RESTARTS tells the ranks how many restarts there were.
#
# LOCKSTEP_END_SECONDS (60) after a rank has failed, srun or mpirun is ended where it has not ended.
#
# SIGINT, SIGTERM, SIGHUP: the ranks get SIGTERM, and LOCKSTEP_GRACE_SECONDS (30) to save; a second
# signal ends them at once. In a batch job Slurm tells them itself. Across nodes mpirun passes on
# SIGUSR1 in the place of SIGTERM, and so does this script.
set -u
name=$1 runs=$2 ranks=$3 max_restarts=$4
shift 4
launch=${1##*/}
readonly kRestart=75
batch=${LOCKSTEP_BATCH:-}
unset LOCKSTEP_BATCH

say() { echo "multinode_run: $*" >&2; }

mkdir -p "$runs" || exit 1
if [[ -n $batch ]]; then
  run=$runs/$name.$SLURM_JOB_ID
  mkdir -p "$run"
else
  run=$(mktemp -d "$runs/$name.XXXXXX") || exit 1
fi
export LOCKSTEP_RUN=$run
trap 'rm -rf "$run"' EXIT

launcher='' signal='' signal_at=0
stop() {  # SIGNAL-NUMBER
  # One signal may come twice, to this process and to its group.
  if [[ -n $signal ]] && ((SECONDS - signal_at < 2)); then return; fi
  local again=$signal
  signal=$1 signal_at=$SECONDS
  [[ -n $launcher && -z $batch ]] || return
  if [[ -n $again ]] || ! tell_ranks; then
    kill -TERM "$launcher" 2>/dev/null
    return
  fi
  say "the ranks were told to stop; once more, and they are ended"
  (
    trap - TERM
    sleep "${LOCKSTEP_GRACE_SECONDS:-30}" &
    trap 'kill $!' TERM
    wait $! && kill -TERM "$launcher" 2>/dev/null
  ) &
  grace=$!
}
trap 'stop 1' HUP
trap 'stop 2' INT
trap 'stop 15' TERM

trap 'touch "$run/stopped"; kill -USR1 $launcher' USR1

# Tells the ranks to stop; SIGTERM to srun or mpirun would end them. False: none has started.
tell_ranks() {
  local file host process
  if [[ -e $run/step ]]; then
    scancel --signal=TERM "$(<"$run/step")"
    return $?  # a bare one, in a trap, returns the status from before the trap
  fi
  [[ $(find "$run/started" -type f | wc -l) == "$ranks" ]] || return 1
  touch "$run/stopped"
  for file in "$run"/started/*; do
    read -r host process <"$file"
    if [[ $host != "$(uname -n)" ]]; then
      kill -USR1 "$launcher"
      return $?
    fi
  done
  for file in "$run"/started/*; do
    read -r host process <"$file"
    kill -TERM -- "-$process" 2>/dev/null || pkill -TERM -P "$process"
  done
}

# srun and mpirun end the other ranks when one has failed, but wait long, or for ever, for those of a node
# that is out of reach.
end_launcher_of_failed_run() {
  trap 'kill $!; exit' TERM
  trap - INT HUP USR1
  until [[ -d $run/first ]]; do pause 1; done
  pause "${LOCKSTEP_END_SECONDS:-60}"
  say "$launch has not ended ${LOCKSTEP_END_SECONDS:-60} s after a rank failed: it is ended"
  kill -TERM "$launcher"
  pause 5
  pkill -KILL -s "$launcher"
}

pause() {  # SECONDS, so that traps need not wait for them
  sleep "$1" &
  wait $!
}

run_once() {
  local status=0 watch
  rm -rf "${run:?}"/*
  mkdir "$run/started" "$run/ended"
  launcher='' grace=''
  LOCKSTEP_STARTED_AT=$(date +%s.%N)  # for --profile_startup of programs
  export LOCKSTEP_STARTED_AT
  # Not in this shell's process group: Ctrl-C is for this shell, which tells the ranks.
  setsid "$@" </dev/null &
  launcher=$!
  end_launcher_of_failed_run >/dev/null &
  watch=$!
  while :; do
    wait "$launcher"
    status=$?
    kill -0 "$launcher" 2>/dev/null || break
  done
  kill "$watch" 2>/dev/null
  launcher=''
  if [[ -n $grace ]]; then kill "$grace" 2>/dev/null; fi
  return "$status"
}

rank_names() {  # RANK...
  case $# in
    1) echo "rank $1" ;;
    2 | 3 | 4) echo "ranks $*" ;;
    *) echo "ranks $1 $2 $3 and $(($# - 3)) more" ;;
  esac
}

signal_name() {  # STATUS
  if (($1 > 128)) && kill -l "$1" >/dev/null 2>&1; then echo " (SIG$(kill -l "$1"))"; fi
}

# Says how the ranks ended; status as in the head of this file.
judge() {  # LAUNCHER'S-STATUS
  local launched=$1 rank status host first='' first_rank='' first_host='' restart='' missing=()
  local ended_by_others='^(143|137)$'  # SIGTERM and SIGKILL: most likely as another rank failed
  # The rank that was the first to fail, unless by SIGTERM. By SIGKILL it was none of ours, which end
  # rank.sh too.
  local culprit=''
  if [[ -s $run/first/rank ]]; then
    culprit=$(<"$run/first/rank")
    read -r status host <"$run/ended/$culprit" && [[ $status != 143 ]] || culprit=''
  fi 2>/dev/null
  for ((rank = 0; rank < ranks; rank++)); do
    if [[ ! -e $run/ended/$rank ]]; then
      missing+=("$rank")
      continue
    fi
    read -r status host <"$run/ended/$rank"
    case $status in
      0) continue ;;
      "$kRestart") restart=yes ;;
    esac
    if [[ -n $culprit && $rank != "$culprit" ]]; then continue; fi
    if [[ -z $first || ($first =~ $ended_by_others && ! $status =~ $ended_by_others) ]]; then
      first=$status first_rank=$rank first_host=$host
    fi
  done
  if [[ -n $restart ]]; then return "$kRestart"; fi
  if ((${#missing[@]} == ranks)) && [[ -z $(ls -A "$run/started") ]]; then
    say "no rank started; do all nodes see $runs? ([stage] directory in the site file)"
    return $((launched ? launched : 1))
  fi
  if ((${#missing[@]})) && [[ -z $culprit ]] && [[ -z $first || $first =~ $ended_by_others ]]; then
    [[ -n $signal ]] || say "never heard how $(rank_names "${missing[@]}") ended: killed, or the node lost ($launch says $launched)"
    return $((launched ? launched : 1))
  fi
  if [[ -n $first ]]; then
    [[ -n $signal ]] || say "rank $first_rank on $first_host ended with status $first$(signal_name "$first")"
    return "$first"
  fi
  if ((launched)); then say "all ranks ended well, though $launch says $launched"; fi
}

restarts=${SLURM_RESTART_COUNT:-0}
if ((restarts > max_restarts)); then
  say "started again $max_restarts times already (--max_restarts)"
  exit 1
fi
while :; do
  export LOCKSTEP_RESTARTS=$restarts
  run_once "$@"
  judge $?
  status=$?
  if [[ -n $signal ]]; then
    if ((status == kRestart)); then say "saved and stopped; start it again to go on"; fi
    if [[ -z $batch ]]; then status=$((128 + signal)); fi
    exit "$status"
  fi
  ((status == kRestart)) || exit "$status"
  if ((restarts >= max_restarts)); then
    say "saved and stopped, to be started again (status $kRestart)$( ((max_restarts)) && echo "; --max_restarts=$max_restarts is used up")"
    exit "$status"
  fi
  if [[ -e $run/stopped ]]; then
    if [[ -z $batch ]]; then
      say "saved and stopped, as this allocation ends"
      exit "$status"
    fi
    say "saved and stopped by Slurm: goes back into the queue"
    rm -rf "$run"  # Slurm may end this script by SIGKILL
    if scontrol requeue "$SLURM_JOB_ID"; then
      sleep 60 &
      wait $!  # for SIGTERM
    fi
    exit "$status"
  fi
  restarts=$((restarts + 1))
  say "saved and stopped: restart $restarts of $max_restarts"
done
