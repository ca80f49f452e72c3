#pragma once

#include <torch/nn/module.h>

#include <vector>

#include "lockstep/parallel/unit.h"

namespace lockstep::parallel {

// Puts a model's forward and backward, and those of each Unit in it, on the timeline of the thread
// that runs them (see tools/trace/recorder.h):
//
//   parallel::Fsdp fsdp(model, comm);
//   const auto tracing = parallel::TraceUnits(*model);   // after the strategy: see below
//   trace::StartRecording();
//   ... a few steps ...
//   trace::StopRecording();
//   absl::Status status = trace::WriteChromeTrace("/tmp/trace.0.json", comm.rank());
//
// "FORWARD" and "BACKWARD" are the model's own, where it is a Unit: backward from the gradient of
// its output to the end of loss.backward(), so with what a strategy waits for there. Inside,
// "FORWARD blocks.0" is a Unit's; "BACKWARD blocks.0" begins with the gradient of its output and
// ends where the next Unit's begins. What the libraries record themselves lies between and inside:
// WAIT_FOR_DATA of a data::Loader, OPTIMIZER, WAIT_FOR_COMMUNICATION of a strategy,
// MEMCPY_IN_FUSION_BUFFER of a gradient that is copied into its bucket, and each operation of a
// communicator on a track of its own. Names are Horovod Timeline's where it has one.
//
// Made after the strategy, so that FSDP's waiting for a Unit's parameters is not in the Unit's
// forward. While nothing is recorded a Unit costs its hooks' two calls. Hooks are gone with what
// this returns. Backward is told apart by thread, as CUDA's runs on others than forward's.
std::vector<HookHandle> TraceUnits(torch::nn::Module& model);

}  // namespace lockstep::parallel
