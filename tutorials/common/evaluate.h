#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/data/dataset.h"
#include "lockstep/models/classifier.h"

namespace lockstep::tutorials {

struct Evaluation {
  double loss = 0;      // mean over the rows
  double accuracy = 0;  // of the rows that are classified right, in %
};

// How well a model does on a whole data set, with fields "images" and "labels", that it does not
// learn. The ranks of `world` take a hundred rows in turn; each row counts once, and all ranks run
// forward equally often, which FSDP needs. Collective.
//
//   const Evaluation test = ValueOrThrow(Evaluate(model, test_set, world));
absl::StatusOr<Evaluation> Evaluate(const models::Classifier& model,
                                    const std::shared_ptr<data::Dataset>& dataset,
                                    comm::Communicator& world);

}  // namespace lockstep::tutorials
