#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lockstep/data/hdf5/hdf5.h"
#include "lockstep/data/hdf5/test_files.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::data::hdf5 {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

const std::vector<Field> kImages = {{.dataset = "images"}};

std::string Message(const absl::Status& status, const std::string& path) {
  return absl::StrReplaceAll(std::string{status.message()}, {{path, "FILE"}});
}

// The error of opening or reading a file with these datasets.
absl::Status ErrorOf(const std::string& path, std::vector<Field> fields = kImages,
                     bool check_in_child = false) {
  auto dataset =
      Open({.files = {path}, .fields = std::move(fields), .check_in_child = check_in_child});
  if (!dataset.ok()) return dataset.status();
  Batch batch;
  absl::Status in_order = (*dataset)
                              ->ReadInOrder(RangeOrder({0, (*dataset)->size()}))
                              ->ReadInto((*dataset)->size(), batch);
  std::vector<int64_t> rows((*dataset)->size());
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int64_t>(i);
  const absl::Status by_rows = (*dataset)->ReadInto(rows, batch);
  EXPECT_EQ(in_order, by_rows);
  return in_order;
}

void Expect(const absl::Status& status, absl::StatusCode code, const std::string& path,
            const std::string& message) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_EQ(Message(status, path), message);
}

TEST(Hdf5Errors, FilesThatAreNone) {
  EXPECT_EQ(ErrorOf("/no/such.h5"), absl::NotFoundError("/no/such.h5: No such file or directory"));
  EXPECT_EQ(ErrorOf("/tmp"),
            absl::InvalidArgumentError("/tmp: is no file, but a folder or a device"));
  const std::string text = TemporaryPath("text.h5");
  WriteFile(text, "<html>404 Not Found</html>");
  Expect(ErrorOf(text), absl::StatusCode::kDataLoss, text,
         "FILE: is no HDF5 file, or a damaged one (file signature not found)");
  const std::string empty = TemporaryPath("empty.h5");
  WriteFile(empty, "");
  Expect(ErrorOf(empty), absl::StatusCode::kDataLoss, empty, "FILE: is empty");
  EXPECT_EQ(Open({}).status(), absl::InvalidArgumentError("hdf5: no file is named"));
  EXPECT_EQ(Open({.files = {text}, .fields = {}}).status(),
            absl::InvalidArgumentError("hdf5: no field is named"));
  EXPECT_EQ(
      Open({.files = {text}, .decode_threads = -1}).status(),
      absl::InvalidArgumentError("hdf5: decode_threads is -1, but must be 0 (one a core) or more"));
  EXPECT_EQ(Open({.files = {text}, .fields = {{.dataset = "a/x"}, {.dataset = "b/x"}}}).status(),
            absl::InvalidArgumentError("hdf5: two fields are called 'x'; set Field::name"));
}

TEST(Hdf5Errors, TruncatedFiles) {
  const std::string path = MakeFile("a.h5", {{.sizes = {100, 5}, .chunk = {7, 5}}});
  const std::string bytes = ReadFile(path);
  WriteFile(path, bytes.substr(0, bytes.size() - 1));
  const absl::Status status = ErrorOf(path);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(Message(status, path),
              StartsWith("FILE: is no HDF5 file, or a damaged one (truncated file: eof = "));
}

TEST(Hdf5Errors, NoSuchDataset) {
  const std::string path = MakeFile("a.h5", {{}, {.name = "labels", .sizes = {23}}});
  Expect(ErrorOf(path, {{.dataset = "image"}}), absl::StatusCode::kNotFound, path,
         "FILE: there is no dataset 'image'; there is images, labels");
  const std::string none = MakeFile("a.h5", {});
  Expect(ErrorOf(none), absl::StatusCode::kNotFound, none,
         "FILE: there is no dataset 'images', and no other");
}

TEST(Hdf5Errors, WhatDoesNotFitTogether) {
  const std::string path = MakeFile("a.h5", {{.sizes = {10, 5}}, {.name = "labels", .sizes = {9}}});
  Expect(ErrorOf(path, {{.dataset = "images"}, {.dataset = "labels"}}),
         absl::StatusCode::kInvalidArgument, path,
         "FILE: 'images' has 10 rows, but 'labels' has 9: they do not belong together");
  const std::string other = MakeFile("b.h5", {{.sizes = {10, 6}}});
  Expect(Open({.files = {path, other}, .fields = kImages}).status(),
         absl::StatusCode::kInvalidArgument, path,
         other + ": 'images': rows have shape (6), but in FILE another");
  const std::string floats = MakeFile("c.h5", {{.type = H5T_IEEE_F32LE, .sizes = {10, 5}}});
  Expect(Open({.files = {path, floats}, .fields = kImages}).status(),
         absl::StatusCode::kInvalidArgument, path,
         floats + ": 'images': holds float32, but in FILE uint8");
  Expect(ErrorOf(path, {{.dataset = "images", .shape = {1, 6}}}),
         absl::StatusCode::kInvalidArgument, path,
         "FILE: 'images': rows have shape (5), which is not 1 x 6 values");
  const std::string empty = MakeFile("a.h5", {{.sizes = {0, 5}}});
  Expect(ErrorOf(empty), absl::StatusCode::kInvalidArgument, empty, "FILE: there are no rows");
  const std::string nothing = MakeFile("a.h5", {{.sizes = {3, 0}}});
  Expect(ErrorOf(nothing), absl::StatusCode::kInvalidArgument, nothing,
         "FILE: 'images': rows of shape (0) hold nothing");
  const std::string scalar = MakeFile("a.h5", {{.sizes = {}}});
  Expect(ErrorOf(scalar), absl::StatusCode::kInvalidArgument, scalar,
         "FILE: 'images': has no rows: it is a single value or nothing");
}

TEST(Hdf5Errors, TypesThatAreNoNumbers) {
  const hid_t text = H5Tcopy(H5T_C_S1);
  H5Tset_size(text, 4);
  const std::string path = MakeFile("a.h5", {{.type = text}});
  Expect(ErrorOf(path), absl::StatusCode::kInvalidArgument, path,
         "FILE: 'images': holds strings, not numbers of a simple type");
  const std::string numbers = MakeFile("a.h5", {{}});
  Expect(ErrorOf(numbers, {{.dataset = "images", .dtype = at::kComplexFloat}}),
         absl::StatusCode::kInvalidArgument, numbers,
         "FILE: 'images': dtype ComplexFloat is not one of those that can be read");
  Expect(ErrorOf(numbers, {{.dataset = "images", .divide_by = 255}}),
         absl::StatusCode::kInvalidArgument, numbers,
         "FILE: 'images': divide_by needs a floating-point dtype, not uint8");
  Expect(ErrorOf(numbers, {{.dataset = "images", .dtype = at::kFloat, .divide_by = 0}}),
         absl::StatusCode::kInvalidArgument, numbers,
         "FILE: 'images': divide_by is 0, by which nothing can be divided");
  Expect(ErrorOf(numbers, {{.dataset = "images", .dtype = at::kFloat, .classes = 10}}),
         absl::StatusCode::kInvalidArgument, numbers,
         "FILE: 'images': labels in classes are integers, and dtype is not an integer type");
}

TEST(Hdf5Errors, AnUnknownFilter) {
  const std::string path = "data/hdf5/testdata/h5py_lzf.h5";
  Expect(ErrorOf(path), absl::StatusCode::kFailedPrecondition, path,
         "FILE: 'images': is stored with filter 32000 (lzf), which this HDF5 does not have; name "
         "the folder of its plugin in HDF5_PLUGIN_PATH, or store the file anew: h5repack -f GZIP=4 "
         "FILE NEW_FILE");
}

TEST(Hdf5Errors, LabelsOutOfRange) {
  // Value(2, 0) is 62, Value(3, 0) is 93.
  const std::string path = MakeFile(
      "a.h5", {{.chunk = {7, 5}}, {.name = "labels", .type = H5T_STD_I16LE, .sizes = {23}}});
  const auto fields = [](int64_t classes) -> std::vector<Field> {
    return {{.dataset = "images"}, {.dataset = "labels", .classes = classes}};
  };
  EXPECT_EQ(ErrorOf(path, fields(100)), absl::OkStatus());
  Expect(ErrorOf(path, fields(93)), absl::StatusCode::kOutOfRange, path,
         "FILE: 'labels', row 3: holds 93, but must be from 0 to 92");
  Expect(ErrorOf(path, {{.dataset = "labels", .dtype = at::kBool}}), absl::StatusCode::kOutOfRange,
         path, "FILE: 'labels', row 1: holds 31, but must be from 0 to 1");
}

TEST(Hdf5Errors, AChecksumThatIsWrong) {
  const std::string path =
      MakeFile("a.h5", {{.sizes = {100, 50}, .chunk = {10, 50}, .fletcher32 = true}});
  std::string bytes = ReadFile(path);
  std::string row;  // row 42, as it is stored
  for (int i = 0; i < 50; ++i) row += static_cast<char>(Value(42, i));
  const size_t at = bytes.find(row);
  ASSERT_NE(at, std::string::npos);
  bytes[at + 7] ^= 1;
  WriteFile(path, bytes);
  Expect(ErrorOf(path), absl::StatusCode::kDataLoss, path,
         "FILE: 'images', rows 40 to 49: the chunk is damaged: its checksum is wrong; fetch the "
         "file again");
  // Rows before it are good.
  auto dataset = ValueOrThrow(Open({.files = {path}, .fields = kImages}));
  auto reader = dataset->ReadInOrder(RangeOrder({0, 100}));
  Batch batch;
  EXPECT_EQ(reader->ReadInto(40, batch), absl::OkStatus());
  EXPECT_EQ(reader->ReadInto(1, batch).code(), absl::StatusCode::kDataLoss);
}

TEST(Hdf5Errors, GzipThatIsDamaged) {
  const std::string path = MakeFile("a.h5", {{.sizes = {100, 50}, .chunk = {100, 50}, .gzip = 9}});
  std::string bytes = ReadFile(path);
  const size_t at = bytes.find("\x78\xda");  // how zlib begins at level 9
  ASSERT_NE(at, std::string::npos);
  bytes[at] ^= 0x40;
  WriteFile(path, bytes);
  Expect(ErrorOf(path), absl::StatusCode::kDataLoss, path,
         "FILE: 'images', rows 0 to 99: the chunk is damaged: its compressed bytes are damaged "
         "(incorrect header check); fetch the file again");
}

TEST(Hdf5Errors, AFileThatShrinksWhileItIsRead) {
  for (int gzip : {0, 4}) {
    const std::string path =
        MakeFile("a.h5", {{.sizes = {1000, 50}, .chunk = {10, 50}, .gzip = gzip}});
    const auto bytes = static_cast<int64_t>(std::filesystem::file_size(path));
    auto dataset = ValueOrThrow(Open({.files = {path}, .fields = kImages}));
    ASSERT_EQ(truncate(path.c_str(), bytes / 2), 0);
    Batch batch;
    const absl::Status status = dataset->ReadInto({999}, batch);
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_EQ(Message(status, path),
              absl::StrCat("FILE: 'images', rows 990 to 999: the file became shorter while it was "
                           "read: it had ",
                           bytes, " bytes, and now has ", bytes / 2,
                           "; do not write to files that are trained on, but rename new ones into "
                           "their place"));
  }
}

TEST(Hdf5Errors, ChunksThatAreTooLargeForTheBudget) {
  const std::string path =
      MakeFile("a.h5", {{.sizes = {1000, 50}, .chunk = {1000, 50}, .gzip = 4}});
  const auto open = [&](int64_t budget) {
    return Open({.files = {path}, .fields = kImages, .memory_budget_bytes = budget}).status();
  };
  const absl::Status status = open(50'000);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  const std::string message = Message(status, path);
  EXPECT_THAT(message, StartsWith("FILE: a chunk of 'images' takes 50000 bytes, for which a memory "
                                  "budget of 50000 bytes is too small; give memory_budget_bytes at "
                                  "least "));
  const int64_t enough = std::stoll(message.substr(message.rfind(' ')));
  EXPECT_LT(enough, 500'000);
  EXPECT_EQ(open(enough), absl::OkStatus());
}

TEST(Hdf5Errors, ReadOnlyFilesCanBeRead) {
  const std::string path = MakeFile("a.h5", {{}});
  chmod(path.c_str(), 0444);
  EXPECT_EQ(ErrorOf(path), absl::OkStatus());
}

TEST(Hdf5Errors, LocksAreTakenOnlyWhenAskedFor) {
  const std::string path = MakeFile("a.h5", {{}});
  // A lock as HDF5 takes it in a program that writes to the file.
  const int other = open(path.c_str(), O_RDONLY);
  ASSERT_EQ(flock(other, LOCK_EX), 0);
  EXPECT_EQ(Open({.files = {path}, .fields = kImages}).status(), absl::OkStatus());
  const absl::Status locked =
      Open({.files = {path}, .fields = kImages, .lock_files = true}).status();
  EXPECT_EQ(locked.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(Message(locked, path), HasSubstr("unable to lock file"));
  close(other);
  EXPECT_EQ(Open({.files = {path}, .fields = kImages, .lock_files = true}).status(),
            absl::OkStatus());
}

TEST(Hdf5Errors, CheckedInAChild) {
  const std::string path =
      MakeFile("a.h5", {{.sizes = {100, 50}, .chunk = {10, 50}, .gzip = 4, .fletcher32 = true}});
  EXPECT_EQ(ErrorOf(path, kImages, /*check_in_child=*/true), absl::OkStatus());
  EXPECT_EQ(ErrorOf("/no/such.h5", kImages, /*check_in_child=*/true),
            absl::NotFoundError("/no/such.h5: No such file or directory"));
  const std::string bytes = ReadFile(path);
  WriteFile(path, bytes.substr(0, bytes.size() / 2));
  EXPECT_THAT(Message(ErrorOf(path, kImages, /*check_in_child=*/true), path),
              StartsWith("FILE: is no HDF5 file, or a damaged one (truncated file: eof = "));
  WriteFile(path, bytes);
  auto good = Open({.files = {path}, .fields = kImages, .check_in_child = true});
  EXPECT_EQ(good.status(), absl::OkStatus());
}

}  // namespace
}  // namespace lockstep::data::hdf5
