#pragma once

#include <cstdint>

#include "absl/flags/declare.h"
#include "lockstep/tutorials/common/flag_types.h"

// --batch, --lr and --seed, for programs that train: link this and they have them.
//
//   torch::manual_seed(absl::GetFlag(FLAGS_seed));
ABSL_DECLARE_FLAG(lockstep::tutorials::Count, batch);  // images a step and rank; 64
ABSL_DECLARE_FLAG(lockstep::tutorials::Rate, lr);      // learning rate; 0.001
ABSL_DECLARE_FLAG(uint64_t, seed);                     // of first weights and order; 1
