#pragma once

#include <string>

#include "absl/flags/declare.h"
#include "absl/strings/string_view.h"

namespace lockstep::tutorials {

// The name of a model that models::Create knows.
struct ModelName {
  std::string value;
};
bool AbslParseFlag(absl::string_view text, ModelName* model, std::string* error);
std::string AbslUnparseFlag(const ModelName& model);

}  // namespace lockstep::tutorials

// --model, for programs whose model is chosen when they run.
//
//   auto model = models::Create(absl::GetFlag(FLAGS_model).value);
ABSL_DECLARE_FLAG(lockstep::tutorials::ModelName, model);  // convnet
