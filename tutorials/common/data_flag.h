#pragma once

#include <string>

#include "absl/flags/declare.h"

// --data, for programs that read MNIST or Fashion-MNIST.
//
//   auto dataset = data::mnist::Open({.directory = absl::GetFlag(FLAGS_data)});
ABSL_DECLARE_FLAG(std::string, data);  // data::mnist::kDefaultDirectory
