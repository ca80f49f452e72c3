#!/bin/bash
# One rank of a multinode_run: rank.sh PROGRAM ARG...
#
# Runs the program and writes "STATUS HOST" to $LOCKSTEP_RUN/ended/RANK when it has ended. That is how
# job.sh knows: srun returns 0 after a node was killed, and 143 in the place of the first bad status.
# SIGTERM and SIGUSR1 reach the program too, from Slurm and from mpirun; this shell outlives it.
#
# LOCKSTEP_LOG_RANKS=0,3 or all: shows the stdout of these ranks only, and the stderr of all, each line
# after "[RANK] ". LOCKSTEP_LOG_DIR: a directory for rank3.out and rank3.err, of all ranks.
set -u
rank=${OMPI_COMM_WORLD_RANK:-${PMIX_RANK:-${SLURM_PROCID:-0}}}
run=$LOCKSTEP_RUN

# Told to stop by the time limit, a preemption or a user; not by the launcher because a rank has ended.
# shellcheck disable=SC2317  # called by the trap
stopped() {
  [[ -n $(ls -A "$run/ended" 2>/dev/null) ]] || touch "$run/stopped"
}
trap stopped TERM USR1
trap : INT HUP

# mpirun gives each rank a terminal, which passes on a line and its end in two parts: lines of
# different ranks mix, more often than when it leaves what it gets as it is.
if [[ -n ${OMPI_COMM_WORLD_RANK:-} && -t 1 ]]; then stty -opost <&1 2>/dev/null; fi

# For job.sh, to reach the ranks by.
if [[ -n ${SLURM_STEP_ID:-} && -z ${OMPI_COMM_WORLD_RANK:-} ]]; then
  [[ $rank != 0 ]] || echo "$SLURM_JOB_ID.$SLURM_STEP_ID" >"$run/step"
fi
echo "$(uname -n) $$" >"$run/started/$rank"

if [[ -z ${OMP_NUM_THREADS:-} ]]; then
  # Of the cores that this rank may use no more than its part of those that the job has here.
  threads=$((${SLURM_CPUS_ON_NODE:-$(nproc --all)} / ${LOCKSTEP_RANKS_PER_NODE:-1}))
  allowed=$(nproc)
  threads=$((threads < allowed ? threads : allowed))
  export OMP_NUM_THREADS=$((threads > 0 ? threads : 1))
fi

# Lines pass whole. What copies them ends when the program has, not by signals.
copy() {  # SUFFIX SHOWN
  trap '' TERM INT HUP USR1
  local file=/dev/null prefix=${LOCKSTEP_LOG_RANKS:+[$rank] }
  if [[ -n ${LOCKSTEP_LOG_DIR:-} ]]; then file=$LOCKSTEP_LOG_DIR/rank$rank.$1; fi
  if [[ $2 == yes ]]; then tee -a "$file" | sed -u "s/^/$prefix/"; else cat >>"$file"; fi
}

if [[ -z ${LOCKSTEP_LOG_RANKS:-}${LOCKSTEP_LOG_DIR:-} ]]; then
  "$@"
else
  shown=no
  case ,${LOCKSTEP_LOG_RANKS:-all}, in *,all,* | *,"$rank",*) shown=yes ;; esac
  {
    {
      trap : TERM INT HUP USR1
      "$@" 2>&3 3>&- 4>&- | copy out $shown >&4 3>&- 4>&-
      exit "${PIPESTATUS[0]}"
    } 3>&1 | copy err yes >&2 4>&-
    (exit "${PIPESTATUS[0]}")
  } 4>&1
fi
status=$?

# Which rank ended badly first: the others may have because of it.
if [[ $status != 0 ]] && mkdir "$run/first" 2>/dev/null; then echo "$rank" >"$run/first/rank"; fi
echo "$status $(uname -n)" >"$run/ended/.$rank" && mv "$run/ended/.$rank" "$run/ended/$rank"
exit "$status"
