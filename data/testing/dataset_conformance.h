#pragma once

#include <functional>
#include <memory>
#include <ostream>
#include <string>

#include "gtest/gtest.h"
#include "lockstep/data/dataset.h"

namespace lockstep::data {

// What every dataset must pass. Link //data/testing:dataset_conformance into the test of yours:
//
//   INSTANTIATE_TEST_SUITE_P(Squares, DatasetConformanceTest,
//                            testing::Values(DatasetCase{
//                                "Thousand", [] { return std::make_unique<Squares>(1000); }}));
//
// Small and awkward sizes find most (1 row, a last chunk that is not full); every row is read.
struct DatasetCase {
  std::string name;
  std::function<std::unique_ptr<Dataset>()> make;

  friend std::ostream& operator<<(std::ostream& out, const DatasetCase& c) { return out << c.name; }
};

class DatasetConformanceTest : public testing::TestWithParam<DatasetCase> {
 protected:
  void SetUp() override {
    dataset_ = GetParam().make();
    ASSERT_NE(dataset_, nullptr);
  }
  std::unique_ptr<Dataset> dataset_;
};

}  // namespace lockstep::data
