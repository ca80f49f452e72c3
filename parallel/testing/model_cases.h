#pragma once

#include <string>

#include "lockstep/models/classifier.h"
#include "lockstep/parallel/testing/parity.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::parallel::testing {

// A training of `model` of models::Create.
inline ParityCase ModelCase(const std::string& model, at::ScalarType dtype) {
  ParityCase c = {.name = model, .sample_shape = {1, 28, 28}, .dtype = dtype, .steps = 3};
  // Adam divides a gradient by its own size: where the true one is zero (the keys' biases),
  // rounding in f32 alone decides the step.
  c.sgd = dtype == at::kFloat;
  c.make = [model] {
    models::Classifier classifier = ValueOrThrow(models::Create(model));
    return ParityModel{classifier.module, classifier.forward};
  };
  return c;
}

}  // namespace lockstep::parallel::testing
