#!/bin/bash
# --run_under of tests with --config=gpu: those that do not ask for GPUs see none, as they start
# more ranks than it may have.
[[ -n ${LOCKSTEP_TEST_SEES_GPUS:-} ]] || export CUDA_VISIBLE_DEVICES=
exec "$@"
