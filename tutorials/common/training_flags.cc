#include "lockstep/tutorials/common/training_flags.h"

#include "absl/flags/flag.h"

ABSL_FLAG(lockstep::tutorials::Count, batch, 64, "images a step, on each rank");
ABSL_FLAG(lockstep::tutorials::Rate, lr, 1e-3, "learning rate");
ABSL_FLAG(uint64_t, seed, 1, "decides the first weights and the order of the images");
