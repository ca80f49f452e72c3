#pragma once

#include <c10/core/Device.h>

namespace lockstep::tutorials {

// What --device says; link this and a program has the flag. "auto" (the default) and "cpu" are the
// CPU; "cuda" is refused when the command line is read.
//
//   model.module->to(tutorials::ChosenDevice());
at::Device ChosenDevice();

}  // namespace lockstep::tutorials
