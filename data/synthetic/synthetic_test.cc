#include "lockstep/data/synthetic/synthetic.h"

#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lockstep/data/testing/dataset_conformance.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::data {
namespace {

using synthetic::Create;
using synthetic::Label;
using synthetic::Options;
using synthetic::Pixel;
using testing::ElementsAre;

DatasetCase Case(std::string name, Options options) {
  return {name, [options] { return ValueOrThrow(Create(options)); }};
}

INSTANTIATE_TEST_SUITE_P(
    Synthetic, DatasetConformanceTest,
    testing::Values(Case("OneRow", {.size = 1}),
                    Case("Scalars", {.size = 257, .shape = {}, .classes = 1}),
                    Case("Chunks", {.size = 100, .shape = {3, 5}, .rows_per_chunk = 7}),
                    Case("OneLargeChunk", {.size = 10, .shape = {2}, .rows_per_chunk = 1000})),
    testing::PrintToStringParamName());

TEST(Synthetic, ValuesAreFunctionsOfSeedRowAndElement) {
  auto dataset = ValueOrThrow(
      Create({.size = 1'000'000'000'000, .shape = {3, 1, 2}, .classes = 7, .seed = 5}));
  EXPECT_EQ(dataset->size(), 1'000'000'000'000);
  const std::vector<int64_t> rows = {999'999'999'999, 0, 257};
  Batch batch;
  ASSERT_EQ(dataset->ReadInto(rows, batch), absl::OkStatus());
  EXPECT_EQ(batch["images"].sizes(), at::IntArrayRef({3, 3, 1, 2}));
  EXPECT_EQ(batch["labels"].sizes(), at::IntArrayRef({3}));
  for (int64_t i = 0; i < 3; ++i) {
    for (int64_t e = 0; e < 6; ++e) {
      EXPECT_EQ(batch["images"].const_data_ptr<float>()[6 * i + e], Pixel(5, rows[i], e));
    }
    EXPECT_EQ(batch["labels"].const_data_ptr<int64_t>()[i], Label(5, rows[i], 7));
  }
}

TEST(Synthetic, ValuesAreUniform) {
  std::set<float> different;
  std::vector<int> labels(10);
  double sum = 0, sum_of_squares = 0;
  for (uint64_t seed : {0, 1}) {
    for (int64_t row = 0; row < 100; ++row) {
      for (int64_t element = 0; element < 100; ++element) {
        const float pixel = Pixel(seed, row, element);
        EXPECT_GE(pixel, 0);
        EXPECT_LT(pixel, 1);
        different.insert(pixel);
        sum += pixel;
        sum_of_squares += pixel * pixel;
      }
    }
    for (int64_t row = 0; row < 5000; ++row) ++labels.at(Label(seed, row, 10));
  }
  EXPECT_GT(different.size(), 19'950) << "neither seed, row nor element is ignored";
  // 20,000 draws: the standard deviation of their mean is 0.002.
  EXPECT_NEAR(sum / 20'000, 0.5, 0.01);
  EXPECT_NEAR(sum_of_squares / 20'000, 1.0 / 3, 0.01);
  for (int count : labels) EXPECT_NEAR(count, 1000, 150);
}

TEST(Synthetic, TellsItsChunks) {
  EXPECT_TRUE(ValueOrThrow(Create({.size = 7}))->chunks().empty());
  EXPECT_THAT(ValueOrThrow(Create({.size = 7, .rows_per_chunk = 3}))->chunks(),
              ElementsAre(RowRange{0, 3}, RowRange{3, 6}, RowRange{6, 7}));
}

TEST(Synthetic, Refusals) {
  for (const Options& options : {Options{.size = 0}, Options{.shape = {2, 0}},
                                 Options{.classes = 0}, Options{.rows_per_chunk = -1}}) {
    EXPECT_EQ(Create(options).status().code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(std::string{Create({.size = 0}).status().message()},
            "synthetic: size (0), classes (10) and each dimension of shape must be at least 1, and "
            "rows_per_chunk (0) at least 0");
}

}  // namespace
}  // namespace lockstep::data
