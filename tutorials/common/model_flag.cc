#include "lockstep/tutorials/common/model_flag.h"

#include <algorithm>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "lockstep/models/classifier.h"

namespace lockstep::tutorials {

bool AbslParseFlag(absl::string_view text, ModelName* model, std::string* error) {
  model->value = std::string(text);
  const std::vector<std::string> names = models::Names();
  if (std::find(names.begin(), names.end(), model->value) != names.end()) return true;
  *error = absl::StrCat("choose one of ", absl::StrJoin(names, ", "));
  return false;
}

std::string AbslUnparseFlag(const ModelName& model) { return model.value; }

}  // namespace lockstep::tutorials

ABSL_FLAG(lockstep::tutorials::ModelName, model, {"convnet"},
          absl::StrCat("what to train: ", absl::StrJoin(lockstep::models::Names(), ", ")));
