#include "lockstep/parallel/strategies.h"

#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "lockstep/parallel/ddp/ddp.h"
#include "lockstep/parallel/fsdp/fsdp.h"
#include "lockstep/parallel/manual/manual.h"
#include "lockstep/parallel/none/none.h"

namespace lockstep::parallel {

absl::StatusOr<std::unique_ptr<Strategy>> MakeStrategy(const std::string& name,
                                                       std::shared_ptr<torch::nn::Module> model,
                                                       comm::Communicator* comm) {
  if (name == "none") return std::make_unique<None>(std::move(model));
  if (comm != nullptr) {
    if (name == "manual") return std::make_unique<Manual>(std::move(model), *comm);
    if (name == "ddp") return std::make_unique<Ddp>(std::move(model), *comm);
    const std::map<std::string, Sharding> shardings = {
        {"fsdp", Sharding::kFull}, {"zero2", Sharding::kGradOp}, {"zero1", Sharding::kOptimizer}};
    const auto sharding = shardings.find(name);
    if (sharding != shardings.end()) {
      return std::make_unique<Fsdp>(std::move(model), *comm,
                                    FsdpOptions{.sharding = sharding->second});
    }
  }
  return absl::InvalidArgumentError(
      absl::StrCat("there is no strategy \"", name, "\": take one of ",
                   absl::StrJoin(StrategyNames(), ", "), "; all but none need a communicator"));
}

const std::vector<std::string>& StrategyNames() {
  static const auto& names =
      *new std::vector<std::string>{"none", "manual", "ddp", "zero1", "zero2", "fsdp"};
  return names;
}

}  // namespace lockstep::parallel
