#pragma once

#include <string>

#include "absl/status/status.h"

namespace lockstep::parallel::checkpoint {

// Writes the model of a checkpoint, of any number of ranks and any strategy, into one safetensors
// file: parameters and buffers by their names in the model, as SaveModule does, for Python
// (safetensors.torch.load_file) and for LoadInto. Needs a megabyte of memory whatever the model's
// size.
//
// `checkpoint`: the folder of one ("runs/a/step-000000000120"), or that of a training, whose newest
// one is taken. `output` is written atomically.
//
// Errors: NOT_FOUND where there is no checkpoint or a shard is missing, DATA_LOSS where a file is
// not what was saved, those of writing `output`; `output` is then what it was before.
absl::Status Consolidate(const std::string& checkpoint, const std::string& output);

}  // namespace lockstep::parallel::checkpoint
