#include "lockstep/data/hdf5/writer.h"

#include <ATen/ops/add.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lockstep/data/hdf5/hdf5.h"
#include "lockstep/data/hdf5/test_files.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::data::hdf5 {
namespace {

using testing::IsEmpty;

// Row r, element e is r + e, of any type.
at::Tensor Rows(int64_t begin, int64_t end, int64_t elements, at::ScalarType dtype) {
  const at::Tensor rows = at::arange(begin, end, at::kLong).unsqueeze(1);
  return at::add(rows, at::arange(elements, at::kLong)).remainder(100).to(dtype).contiguous();
}

TEST(Writer, WhatIsWrittenIsRead) {
  for (at::ScalarType dtype :
       {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kFloat, at::kDouble}) {
    for (int gzip : {0, 5}) {
      for (bool checked : {false, true}) {
        const std::string path = TemporaryPath("w.h5");
        auto writer = ValueOrThrow(Writer::Create(
            path, {.fields = {{.dataset = "x", .dtype = dtype, .shape = {9}, .chunk_rows = 10},
                              {.dataset = "y", .dtype = at::kLong, .shape = {1}, .chunk_rows = 99}},
                   .rows = 257,
                   .gzip = gzip,
                   .shuffle = checked,
                   .fletcher32 = checked}));
        for (int64_t begin = 0; begin < 257; begin += 100) {
          const int64_t end = std::min<int64_t>(257, begin + 100);
          ThrowIfError(
              writer->Append({Rows(begin, end, 9, dtype), Rows(begin, end, 1, at::kLong)}));
        }
        EXPECT_FALSE(std::filesystem::exists(path));
        ThrowIfError(writer->Commit());
        auto dataset =
            ValueOrThrow(Open({.files = {path}, .fields = {{.dataset = "x"}, {.dataset = "y"}}}));
        EXPECT_THAT(dataset->notes(), IsEmpty());
        EXPECT_EQ(dataset->chunks().size(), 26);
        Batch batch;
        ThrowIfError(dataset->ReadInOrder(RangeOrder({0, 257}))->ReadInto(257, batch));
        EXPECT_TRUE(at::equal(batch["x"], Rows(0, 257, 9, dtype)));
        EXPECT_TRUE(at::equal(batch["y"], Rows(0, 257, 1, at::kLong)));
      }
    }
  }
}

std::vector<std::string> FilesBeside(const std::string& path) {
  std::vector<std::string> names;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::filesystem::path(path).parent_path())) {
    names.push_back(entry.path().filename().string());
  }
  return names;
}

TEST(Writer, LeavesNothingWithoutCommit) {
  const std::string path = TemporaryPath("w.h5");
  {
    auto writer = ValueOrThrow(
        Writer::Create(path, {.fields = {{.dataset = "x", .shape = {3}}}, .rows = 10}));
    ThrowIfError(writer->Append({Rows(0, 5, 3, at::kByte)}));
    EXPECT_THAT(FilesBeside(path), testing::ElementsAre(absl::StrCat("w.h5.tmp.", getpid())));
    EXPECT_EQ(writer->Commit(), absl::InvalidArgumentError(absl::StrCat(
                                    path, ": 5 rows were written of 10 that were promised")));
  }
  EXPECT_THAT(FilesBeside(path), IsEmpty());
}

TEST(Writer, KeepsTheOldFileUntilTheNewOneIsWhole) {
  const std::string path = MakeFile("w.h5", {{.name = "old"}});
  const std::string old = ReadFile(path);
  auto writer =
      ValueOrThrow(Writer::Create(path, {.fields = {{.dataset = "x", .shape = {3}}}, .rows = 5}));
  ThrowIfError(writer->Append({Rows(0, 5, 3, at::kByte)}));
  EXPECT_EQ(ReadFile(path), old);
  ThrowIfError(writer->Commit());
  EXPECT_NE(ReadFile(path), old);
}

TEST(Writer, Refusals) {
  const std::string path = TemporaryPath("w.h5");
  const auto error = [&](WriterOptions options) {
    return std::string{Writer::Create(path, std::move(options)).status().message()};
  };
  EXPECT_EQ(error({.rows = 1}), path + ": no field is named");
  EXPECT_EQ(error({.fields = {{.dataset = "x"}}}), path + ": rows is 0, but must be at least 1");
  EXPECT_EQ(error({.fields = {{.dataset = "x"}}, .rows = 1, .gzip = 10}),
            path + ": gzip is 10, but must be from 0 to 9");
  EXPECT_EQ(error({.fields = {{.dataset = "x", .dtype = at::kHalf}}, .rows = 1}),
            path + ": 'x' cannot be of type Half");
  EXPECT_EQ(error({.fields = {{.dataset = "x", .chunk_rows = 0}}, .rows = 1}),
            path + ": 'x' has chunk_rows 0, but must have at least 1");
  EXPECT_EQ(error({.fields = {{.dataset = "x", .shape = {2, 0}}}, .rows = 1}),
            path + ": 'x' has rows of shape 2 x 0, which hold nothing");
  EXPECT_EQ(
      Writer::Create("/no/such/w.h5", {.fields = {{.dataset = "x"}}, .rows = 1}).status().code(),
      absl::StatusCode::kUnavailable);

  auto writer =
      ValueOrThrow(Writer::Create(path, {.fields = {{.dataset = "x", .shape = {3}}}, .rows = 5}));
  const auto append = [&](const std::vector<at::Tensor>& fields) {
    return std::string{writer->Append(fields).message()};
  };
  EXPECT_EQ(append({}), path + ": 0 tensors for 1 datasets");
  const std::string fit = path +
                          ": 'x' takes contiguous tensors of Byte on the CPU, equally many "
                          "rows of shape (3)";
  EXPECT_EQ(append({at::zeros({2, 4}, at::kByte)}), fit);
  EXPECT_EQ(append({at::zeros({2, 3}, at::kFloat)}), fit);
  EXPECT_EQ(append({at::zeros({3, 3}, at::kByte).t()}), fit);
  EXPECT_EQ(append({at::zeros({6, 3}, at::kByte)}),
            path + ": 6 rows are more than the 5 that were promised");
}

}  // namespace
}  // namespace lockstep::data::hdf5
