#include "lockstep/data/hdf5/hdf5.h"

#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lockstep/data/hdf5/test_files.h"
#include "lockstep/data/testing/dataset_conformance.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::data {
namespace {

using hdf5::Field;
using hdf5::MakeFile;
using hdf5::MakeVirtualFile;
using hdf5::Open;
using hdf5::Options;
using hdf5::TestDataset;
using hdf5::Value;
using testing::ElementsAre;
using testing::HasSubstr;

const std::vector<Field> kImages = {{.dataset = "images"}};

std::string TestData(const std::string& name) { return "data/hdf5/testdata/" + name; }

DatasetCase Case(std::string name, const std::vector<TestDataset>& datasets, Options options = {},
                 bool latest = false) {
  if (options.fields.size() == 2) {
    options.fields.clear();
    for (const TestDataset& dataset : datasets) options.fields.push_back({.dataset = dataset.name});
  }
  return {name, [=]() mutable {
            options.files = {MakeFile("a.h5", datasets, latest)};
            return ValueOrThrow(Open(options));
          }};
}

// The type of NumPy's booleans, as h5py writes them.
hid_t BoolType() {
  static const hid_t type = [] {
    const hid_t made = H5Tenum_create(H5T_STD_I8LE);
    int8_t value = 0;
    H5Tenum_insert(made, "FALSE", &value);
    value = 1;
    H5Tenum_insert(made, "TRUE", &value);
    return made;
  }();
  return type;
}

// Labels with names, in the other byte order.
hid_t LabelType() {
  static const hid_t type = [] {
    const hid_t made = H5Tenum_create(H5T_STD_I16BE);
    for (int16_t value = 0; value < 100; ++value) {
      const uint16_t swapped = __builtin_bswap16(static_cast<uint16_t>(value));
      H5Tenum_insert(made, ("label" + std::to_string(value)).c_str(), &swapped);
    }
    return made;
  }();
  return type;
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, DatasetConformanceTest,
    testing::Values(
        Case("Contiguous", {{}}), Case("Compact", {{.compact = true}}),
        Case("Enumeration", {{.type = LabelType(), .chunk = {7, 5}}}),
        Case("Chunked", {{.chunk = {7, 5}}}), Case("ChunkedLatest", {{.chunk = {7, 5}}}, {}, true),
        Case("Gzip", {{.sizes = {257, 4}, .chunk = {10, 4}, .gzip = 1}}),
        Case("GzipShuffle", {{.type = H5T_STD_I32LE, .chunk = {7, 5}, .gzip = 9, .shuffle = true}}),
        Case("Shuffle", {{.type = H5T_STD_I16LE, .chunk = {7, 5}, .shuffle = true}}),
        Case("Fletcher32", {{.chunk = {7, 5}, .fletcher32 = true}}),
        Case("AllFilters", {{.type = H5T_IEEE_F32LE,
                             .chunk = {7, 5},
                             .gzip = 4,
                             .shuffle = true,
                             .fletcher32 = true}}),
        Case("AllFiltersOtherOrder",
             {{.type = H5T_IEEE_F64LE,
               .chunk = {7, 5},
               .gzip = 4,
               .shuffle = true,
               .fletcher32_first = true}},
             {}, true),
        Case("UnfilteredEdges",
             {{.chunk = {7, 5}, .gzip = 4, .fletcher32 = true, .unfiltered_edges = true}}, {},
             true),
        Case("ScaleOffset", {{.type = H5T_STD_I32LE, .chunk = {7, 5}, .scale_offset = true}}),
        Case("PartsOfRows", {{.sizes = {23, 6, 5}, .chunk = {7, 4, 2}, .gzip = 4}}),
        Case("OneRowChunks", {{.chunk = {1, 5}, .gzip = 4}}),
        Case("OneRow", {{.sizes = {1, 5}, .chunk = {1, 5}}}),
        Case("OneLargeChunk", {{.chunk = {23, 5}, .gzip = 4}}),
        Case("BigEndian", {{.type = H5T_IEEE_F64BE, .chunk = {7, 5}, .gzip = 4}}),
        Case("NeverWritten", {{.chunk = {7, 5}, .gzip = 4, .rows_written = 10}}),
        Case("Locked", {{.chunk = {7, 5}}}, {.lock_files = true}),
        Case("LockedGzip", {{.chunk = {7, 5}, .gzip = 4, .fletcher32 = true}},
             {.lock_files = true}),
        Case("LockedNeverWritten", {{.chunk = {7, 5}, .gzip = 4, .rows_written = 10}},
             {.lock_files = true}),
        Case("Direct", {{.sizes = {130, 2000}, .chunk = {20, 2000}}}),
        Case("DirectContiguous", {{.sizes = {1500, 2000}}}),
        Case("DirectNeverWritten",
             {{.sizes = {130, 2000}, .chunk = {20, 2000}, .rows_written = 50}}, {}, true),
        Case("DirectLittleMemory", {{.sizes = {130, 2000}, .chunk = {20, 2000}}},
             {.memory_budget_bytes = 120'000}),
        Case("DirectTwoColumns",
             {{.sizes = {130, 2000}, .chunk = {20, 2000}},
              {.name = "more", .type = H5T_STD_I64LE, .sizes = {130, 300}, .chunk = {16, 300}}},
             {.memory_budget_bytes = 240'000}),
        Case("TwoColumns",
             {{.chunk = {7, 5}, .gzip = 4}, {.name = "labels", .sizes = {23}, .chunk = {5}}}),
        Case("TwoStreamedColumns",
             {{.sizes = {1000, 5}, .chunk = {7, 5}, .gzip = 4},
              {.name = "labels", .type = H5T_STD_I64LE, .sizes = {1000}, .chunk = {5}, .gzip = 1}},
             {.memory_budget_bytes = 16'000}),
        Case("LittleMemory", {{.sizes = {1000, 5}, .chunk = {7, 5}, .gzip = 4}},
             {.memory_budget_bytes = 8'000, .decode_threads = 3}),
        Case("LittleMemoryPlain", {{.sizes = {1000, 5}, .chunk = {7, 5}}},
             {.memory_budget_bytes = 1'000})),
    testing::PrintToStringParamName());

DatasetCase FileCase(std::string name, Options options) {
  return {name, [options] { return ValueOrThrow(Open(options)); }};
}

INSTANTIATE_TEST_SUITE_P(
    Files, DatasetConformanceTest,
    testing::Values(
        FileCase("H5pyGzip", {.files = {TestData("h5py_gzip.h5")}}),
        FileCase("H5pyV110", {.files = {TestData("h5py_v110.h5")},
                              .fields = {{.dataset = "images"}, {.dataset = "train/labels"}}}),
        FileCase("H5pyAuto", {.files = {TestData("h5py_auto.h5")}}),
        FileCase("H5pyTypes", {.files = {TestData("h5py_types.h5")},
                               .fields = {{.dataset = "bool", .dtype = at::kBool},
                                          {.dataset = "f2"},
                                          {.dataset = "big_f2", .dtype = at::kBFloat16},
                                          {.dataset = "big_i4"}},
                               .memory_budget_bytes = 60'000}),
        FileCase("H5pyVirtual", {.files = {TestData("h5py_virtual.h5")}, .fields = kImages}),
        FileCase("H5repack", {.files = {TestData("h5repack.h5")}}),
        FileCase("Several", {.files = {TestData("h5py_gzip.h5"), TestData("h5py_auto.h5"),
                                       TestData("h5repack.h5")}})),
    testing::PrintToStringParamName());

// All rows, by both ways of reading.
std::vector<Batch> ReadAll(Dataset& dataset) {
  std::vector<Batch> batches(2);
  std::vector<int64_t> rows(dataset.size());
  std::iota(rows.begin(), rows.end(), 0);
  ThrowIfError(dataset.ReadInto(rows, batches[0]));
  ThrowIfError(
      dataset.ReadInOrder(RangeOrder({0, dataset.size()}))->ReadInto(dataset.size(), batches[1]));
  return batches;
}

std::vector<double> AsDoubles(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.to(at::kDouble).reshape({-1});
  return {flat.const_data_ptr<double>(), flat.const_data_ptr<double>() + flat.numel()};
}

std::vector<double> Values(int64_t rows, int64_t elements) {
  std::vector<double> values;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < elements; ++i) values.push_back(static_cast<double>(Value(row, i)));
  }
  return values;
}

TEST(Hdf5, EveryTypeAsItIs) {
  const std::pair<hid_t, at::ScalarType> types[] = {
      {H5T_STD_U8LE, at::kByte},        {H5T_STD_I8LE, at::kChar},
      {H5T_STD_U16LE, at::kInt},        {H5T_STD_I16LE, at::kShort},
      {H5T_STD_U32LE, at::kLong},       {H5T_STD_I32LE, at::kInt},
      {H5T_STD_U64LE, at::kLong},       {H5T_STD_I64LE, at::kLong},
      {H5T_IEEE_F32LE, at::kFloat},     {H5T_IEEE_F64LE, at::kDouble},
      {H5T_STD_U16BE, at::kInt},        {H5T_STD_I64BE, at::kLong},
      {H5T_IEEE_F32BE, at::kFloat},     {H5T_IEEE_F64BE, at::kDouble},
      {H5T_NATIVE_LDOUBLE, at::kDouble}};
  for (const auto& [type, dtype] : types) {
    for (const std::vector<hsize_t>& chunk : {std::vector<hsize_t>{}, {6, 3, 5}}) {
      auto dataset = ValueOrThrow(
          Open({.files = {MakeFile("a.h5", {{.type = type, .sizes = {23, 3, 5}, .chunk = chunk}})},
                .fields = kImages}));
      for (const Batch& batch : ReadAll(*dataset)) {
        EXPECT_EQ(batch["images"].scalar_type(), dtype);
        EXPECT_EQ(batch["images"].sizes(), at::IntArrayRef({23, 3, 5}));
        EXPECT_EQ(AsDoubles(batch["images"]), Values(23, 15));
      }
    }
  }
}

TEST(Hdf5, EveryTypeAsAnyOther) {
  for (hid_t type : {H5T_STD_U8LE, H5T_STD_I16LE, H5T_STD_U64LE, H5T_IEEE_F32LE}) {
    const std::string path = MakeFile("a.h5", {{.type = type, .chunk = {6, 5}}});
    for (at::ScalarType dtype : {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf,
                                 at::kBFloat16, at::kFloat, at::kDouble}) {
      const bool integer = c10::isIntegralType(dtype, /*includeBool=*/false);
      auto dataset = Open({.files = {path}, .fields = {{.dataset = "images", .dtype = dtype}}});
      if (type == H5T_IEEE_F32LE && integer) {
        EXPECT_THAT(std::string{dataset.status().message()}, HasSubstr("holds float32, which"));
        continue;
      }
      ASSERT_TRUE(dataset.ok()) << dataset.status();
      for (const Batch& batch : ReadAll(**dataset)) {
        EXPECT_EQ(batch["images"].scalar_type(), dtype);
        EXPECT_EQ(AsDoubles(batch["images"]), Values(23, 5)) << dtype;
      }
    }
  }
}

TEST(Hdf5, BytesBecomeBrightness) {
  auto dataset = ValueOrThrow(
      Open({.files = {MakeFile("a.h5", {{.sizes = {23, 2, 3}, .chunk = {6, 2, 3}, .gzip = 4}})},
            .fields = {{.dataset = "images",
                        .name = "x",
                        .dtype = at::kFloat,
                        .divide_by = 255,
                        .shape = {1, 2, 3}}}}));
  for (const Batch& batch : ReadAll(*dataset)) {
    EXPECT_THAT(batch.names(), ElementsAre("x"));
    EXPECT_EQ(batch["x"].sizes(), at::IntArrayRef({23, 1, 2, 3}));
    const float* pixel = batch["x"].const_data_ptr<float>();
    for (int64_t row = 0; row < 23; ++row) {
      for (int64_t i = 0; i < 6; ++i) {
        EXPECT_EQ(*pixel++, static_cast<float>(Value(row, i)) / 255.0f);
      }
    }
  }
}

TEST(Hdf5, FilesOfOthersHoldWhatTheyShould) {
  for (const char* name : {"h5py_gzip.h5", "h5py_auto.h5", "h5repack.h5"}) {
    auto dataset = ValueOrThrow(Open({.files = {TestData(name)}}));
    for (const Batch& batch : ReadAll(*dataset)) {
      EXPECT_EQ(AsDoubles(batch["images"]), Values(50, 30)) << name;
      for (int64_t row = 0; row < 50; ++row) {
        EXPECT_EQ(batch["labels"].const_data_ptr<int64_t>()[row], Value(row, 0) % 10);
      }
    }
  }
  auto types = ValueOrThrow(Open({.files = {TestData("h5py_types.h5")},
                                  .fields = {{.dataset = "bool", .dtype = at::kBool},
                                             {.dataset = "f2"},
                                             {.dataset = "big_f2"},
                                             {.dataset = "big_i4"}}}));
  for (const Batch& batch : ReadAll(*types)) {
    EXPECT_EQ(batch["f2"].scalar_type(), at::kHalf);
    EXPECT_EQ(batch["big_i4"].scalar_type(), at::kInt);
    for (const char* name : {"f2", "big_f2", "big_i4"}) {
      EXPECT_EQ(AsDoubles(batch[name]), Values(50, 30)) << name;
    }
    std::vector<double> bits = Values(50, 30);
    for (double& bit : bits) bit = static_cast<int>(bit) % 2;
    EXPECT_EQ(AsDoubles(batch["bool"]), bits);
  }
}

TEST(Hdf5, Booleans) {
  auto dataset = ValueOrThrow(Open(
      {.files = {MakeFile("a.h5", {{.type = BoolType(), .sizes = {1, 1}}})}, .fields = kImages}));
  for (const Batch& batch : ReadAll(*dataset)) {
    EXPECT_EQ(batch["images"].scalar_type(), at::kChar);
    EXPECT_THAT(AsDoubles(batch["images"]), ElementsAre(0));
  }
}

TEST(Hdf5, NeighboursGoStraightToTheBatch) {
  const std::string path = MakeFile("a.h5", {{.sizes = {1000, 2000}, .chunk = {100, 2000}}});
  for (at::ScalarType dtype : {at::kByte, at::kDouble}) {
    auto dataset =
        ValueOrThrow(Open({.files = {path}, .fields = {{.dataset = "images", .dtype = dtype}}}));
    auto reader = dataset->ReadInOrder(RangeOrder({0, 1000}));
    Batch batch;
    std::vector<double> values;
    for (int64_t count : {1, 99, 101, 250, 1000}) {
      ThrowIfError(reader->ReadInto(count, batch));
      const std::vector<double> more = AsDoubles(batch["images"]);
      values.insert(values.end(), more.begin(), more.end());
    }
    EXPECT_EQ(values, Values(1000, 2000));
    EXPECT_EQ(dataset->stats().chunks_read, 10);
    EXPECT_EQ(dataset->stats().bytes_read, 1000 * 2000);
    EXPECT_LT(dataset->stats().peak_memory_bytes, 2000 * 1000) << "no chunk is kept";
  }
}

TEST(Hdf5, SeveralFilesAreOneDataset) {
  const std::vector<std::string> files = {
      MakeFile("a.h5", {{.sizes = {10, 5}, .chunk = {4, 5}}}),
      MakeFile("b.h5", {{.sizes = {0, 5}, .chunk = {4, 5}}}),
      MakeFile("c.h5", {{.sizes = {6, 5}, .chunk = {3, 5}, .gzip = 4, .first_row = 10}}),
      MakeFile("d.h5", {{.sizes = {1, 5}, .first_row = 16}})};
  auto dataset = ValueOrThrow(Open({.files = files, .fields = kImages}));
  EXPECT_EQ(dataset->size(), 17);
  for (const Batch& batch : ReadAll(*dataset)) {
    EXPECT_EQ(AsDoubles(batch["images"]), Values(17, 5));
  }
  EXPECT_THAT(dataset->chunks(), ElementsAre(RowRange{0, 4}, RowRange{4, 8}, RowRange{8, 10},
                                             RowRange{10, 13}, RowRange{13, 16}, RowRange{16, 17}));
  EXPECT_THAT(dataset->notes(),
              ElementsAre(files[3] + ": 'images' is not chunked: it is read 1 rows at a time"));
}

TEST(Hdf5, AVirtualDatasetIsItsParts) {
  const std::string a = MakeFile("a.h5", {{.sizes = {8, 5}, .chunk = {4, 5}, .gzip = 4}});
  const std::string b = MakeFile("b.h5", {{.sizes = {8, 5}, .first_row = 8}});
  const std::string path = MakeVirtualFile("v.h5", "images", {a, b}, 8, {5});
  auto dataset = ValueOrThrow(Open({.files = {path}, .fields = kImages}));
  for (const Batch& batch : ReadAll(*dataset)) {
    EXPECT_EQ(AsDoubles(batch["images"]), Values(16, 5));
  }
  std::remove(b.c_str());
  const absl::Status missing = Open({.files = {path}, .fields = kImages}).status();
  EXPECT_EQ(missing, absl::NotFoundError(path +
                                         ": 'images': is put together from other files, of "
                                         "which " +
                                         b + ": No such file or directory"));
}

TEST(Hdf5, ChunksAreThoseOfTheLargestDataset) {
  const auto chunks = [](int64_t budget, hsize_t image_rows, hsize_t label_rows) {
    return ValueOrThrow(
               Open({.files = {MakeFile(
                         "a.h5", {{.sizes = {6000, 50}, .chunk = {image_rows, 50}},
                                  {.name = "labels", .sizes = {6000}, .chunk = {label_rows}}})},
                     .memory_budget_bytes = budget}))
        ->chunks();
  };
  EXPECT_EQ(chunks(1 << 20, 10, 15).size(), 600) << "labels stay in memory";
  // Without the memory to keep the labels, no chunk of them may lie across two of chunks().
  const std::vector<RowRange> grouped = chunks(32'000, 10, 15);
  ASSERT_EQ(grouped.size(), 200);
  for (size_t i = 0; i < grouped.size(); ++i) {
    EXPECT_EQ(grouped[i],
              (RowRange{static_cast<int64_t>(30 * i), static_cast<int64_t>(30 * i + 30)}));
  }
  EXPECT_EQ(chunks(32'000, 10, 999).size(), 600) << "unless the groups would be too large";
}

}  // namespace
}  // namespace lockstep::data
