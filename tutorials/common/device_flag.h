#pragma once

#include <c10/core/Device.h>

namespace lockstep::tutorials {

// What --device says; link this and a program has the flag. "auto" (the default) is the first GPU
// that the process sees, or the CPU; "cuda" is refused when the command line is read where no GPU
// can be used: it was built without --config=gpu, or there is none.
//
//   model.module->to(tutorials::ChosenDevice());
at::Device ChosenDevice();

}  // namespace lockstep::tutorials
