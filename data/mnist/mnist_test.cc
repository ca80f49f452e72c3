#include "lockstep/data/mnist/mnist.h"

#include <zlib.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lockstep/data/testing/dataset_conformance.h"
#include "lockstep/tools/status/status_error.h"

namespace lockstep::data {
namespace {

using mnist::Open;
using mnist::Split;
using testing::ElementsAre;

std::string BigEndian(uint32_t value) {
  std::string bytes;
  for (int shift : {24, 16, 8, 0}) bytes.push_back(static_cast<char>(value >> shift));
  return bytes;
}

std::string Idx(const std::vector<uint32_t>& sizes, const std::string& values) {
  std::string file = BigEndian(0x800 + sizes.size());
  for (uint32_t size : sizes) file += BigEndian(size);
  return file + values;
}

// Pixel i of image r is the byte 31 r + i; label r is r mod 10.
std::string Images(uint32_t count) {
  std::string values;
  for (uint32_t row = 0; row < count; ++row) {
    for (uint32_t i = 0; i < 784; ++i) values.push_back(static_cast<char>(31 * row + i));
  }
  return Idx({count, 28, 28}, values);
}

std::string Labels(uint32_t count) {
  std::string values;
  for (uint32_t row = 0; row < count; ++row) values.push_back(static_cast<char>(row % 10));
  return Idx({count}, values);
}

std::string Gzip(const std::string& plain) {
  z_stream stream = {};
  deflateInit2(&stream, /*level=*/6, Z_DEFLATED, MAX_WBITS + 16, /*memLevel=*/8,
               Z_DEFAULT_STRATEGY);
  std::string compressed(deflateBound(&stream, plain.size()), '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(plain.data()));
  stream.avail_in = plain.size();
  stream.next_out = reinterpret_cast<Bytef*>(compressed.data());
  stream.avail_out = compressed.size();
  deflate(&stream, Z_FINISH);
  compressed.resize(stream.total_out);
  deflateEnd(&stream);
  return compressed;
}

using Files = std::vector<std::pair<std::string, std::string>>;  // name, content

// A new folder with these files.
std::string Folder(const Files& files) {
  static int count = 0;
  const std::string folder = absl::StrCat(std::getenv("TEST_TMPDIR"), "/folder", count++);
  std::filesystem::create_directories(folder);
  for (const auto& [name, content] : files) {
    std::ofstream(folder + "/" + name, std::ios::binary) << content;
  }
  return folder;
}

DatasetCase Case(std::string name, const Files& files, Split split = Split::kTrain) {
  return {name, [files, split] {
            return ValueOrThrow(Open({.directory = Folder(files), .split = split}));
          }};
}

std::string BytesFolder() {
  return Folder({{"train-images-idx3-ubyte", Images(7)}, {"train-labels-idx1-ubyte", Labels(7)}});
}

INSTANTIATE_TEST_SUITE_P(
    Mnist, DatasetConformanceTest,
    testing::Values(Case("Plain", {{"train-images-idx3-ubyte", Images(23)},
                                   {"train-labels-idx1-ubyte", Labels(23)}}),
                    Case("Gzip", {{"train-images-idx3-ubyte.gz", Gzip(Images(257))},
                                  {"train-labels-idx1-ubyte.gz", Gzip(Labels(257))}}),
                    Case("DottedNamesAndMixed",
                         {{"t10k-images.idx3-ubyte", Images(1)},
                          {"t10k-labels.idx1-ubyte.gz", Gzip(Labels(1))}},
                         Split::kTest),
                    DatasetCase{"AsBytes",
                                [] {
                                  return ValueOrThrow(
                                      Open({.directory = BytesFolder(), .as_bytes = true}));
                                }}),
    testing::PrintToStringParamName());

TEST(Mnist, ServesBytesAsBrightnessFromZeroToOne) {
  auto dataset = ValueOrThrow(Open({.directory = Folder({
                                        {"train-images-idx3-ubyte", Images(12)},
                                        {"train-labels-idx1-ubyte", Labels(12)},
                                    })}));
  EXPECT_EQ(dataset->size(), 12);
  EXPECT_TRUE(dataset->thread_safe());
  EXPECT_TRUE(dataset->chunks().empty());
  Batch batch;
  ASSERT_EQ(dataset->ReadInto({11, 0}, batch), absl::OkStatus());
  EXPECT_THAT(batch.names(), ElementsAre("images", "labels"));
  EXPECT_EQ(batch["images"].sizes(), at::IntArrayRef({2, 1, 28, 28}));
  EXPECT_EQ(batch["images"].scalar_type(), at::kFloat);
  EXPECT_EQ(batch["labels"].sizes(), at::IntArrayRef({2}));
  const float* pixels = batch["images"].const_data_ptr<float>();
  for (int i = 0; i < 784; ++i) {
    EXPECT_EQ(pixels[i], static_cast<float>((31 * 11 + i) % 256) / 255.0f);
    EXPECT_EQ(pixels[784 + i], static_cast<float>(i % 256) / 255.0f);
  }
  EXPECT_EQ(batch["labels"].const_data_ptr<int64_t>()[0], 1);
  EXPECT_EQ(batch["labels"].const_data_ptr<int64_t>()[1], 0);
  EXPECT_EQ(dataset->ReadInto({12}, batch),
            absl::OutOfRangeError("mnist train: row 12 was asked for, but there are rows 0 to 11 "
                                  "only. Was the sampler made for another dataset?"));
}

TEST(Mnist, ServesBytesAsTheyAreWhenAsked) {
  auto dataset = ValueOrThrow(Open({.directory = BytesFolder(), .as_bytes = true}));
  Batch batch;
  ASSERT_EQ(dataset->ReadInto({6, 0}, batch), absl::OkStatus());
  EXPECT_EQ(batch["images"].sizes(), at::IntArrayRef({2, 28, 28}));
  EXPECT_EQ(batch["images"].scalar_type(), at::kByte);
  const uint8_t* pixels = batch["images"].const_data_ptr<uint8_t>();
  for (int i = 0; i < 784; ++i) {
    EXPECT_EQ(pixels[i], (31 * 6 + i) % 256);
    EXPECT_EQ(pixels[784 + i], i % 256);
  }
}

// The error for a folder with these two files; FOLDER stands for its path.
std::string ErrorOf(const std::string& images, const std::string& labels,
                    const std::string& suffix = "") {
  const std::string folder = Folder(
      {{"train-images-idx3-ubyte" + suffix, images}, {"train-labels-idx1-ubyte" + suffix, labels}});
  const absl::Status status = Open({.directory = folder}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  std::string message{status.message()};
  for (size_t at; (at = message.find(folder)) != std::string::npos;) {
    message.replace(at, folder.size(), "FOLDER");
  }
  return message;
}

TEST(MnistErrors, TruncatedFiles) {
  const std::string images = Images(3), labels = Labels(3);
  EXPECT_EQ(ErrorOf(images.substr(0, images.size() - 1), labels),
            "FOLDER/train-images-idx3-ubyte: is cut off: its header promises 3 x 28 x 28 bytes of "
            "values, "
            "it has 2351; fetch the file again");
  EXPECT_EQ(ErrorOf(images, labels.substr(0, 7)),
            "FOLDER/train-labels-idx1-ubyte: is cut off: 7 bytes, of which the header alone takes "
            "8; fetch the file again");
  EXPECT_EQ(ErrorOf("", labels),
            "FOLDER/train-images-idx3-ubyte: is cut off: 0 bytes, of which the header alone takes "
            "16; fetch the file again");
  // Sizes of which the product does not fit 64 bits.
  EXPECT_EQ(ErrorOf(Idx({0xffffffff, 0xffffffff, 0xffffffff}, "x"), labels),
            "FOLDER/train-images-idx3-ubyte: is cut off: its header promises 4294967295 x "
            "4294967295 x 4294967295 bytes of values, it has 1; fetch the file again");
}

TEST(MnistErrors, TrailingBytes) {
  EXPECT_EQ(ErrorOf(Images(3), Labels(3) + "xy"),
            "FOLDER/train-labels-idx1-ubyte: goes on after its end: its header promises 3 bytes of "
            "values, it has 5; fetch the file again");
  EXPECT_EQ(ErrorOf(Gzip(Images(3)), Gzip(Labels(3)) + "xyz", ".gz"),
            "FOLDER/train-labels-idx1-ubyte.gz: 3 bytes follow the end of the gzip file; fetch the "
            "file again");
}

TEST(MnistErrors, WrongMagicNumber) {
  EXPECT_EQ(ErrorOf(Labels(3), Labels(3)),
            "FOLDER/train-images-idx3-ubyte: magic number is 0x00000801, but an IDX file of bytes "
            "with 3 dimensions has 0x00000803; fetch the file again");
  EXPECT_EQ(ErrorOf(Images(3), "<html>404 Not Found</html>"),
            "FOLDER/train-labels-idx1-ubyte: magic number is 0x3c68746d, but an IDX file of bytes "
            "with 1 dimensions has 0x00000801; fetch the file again");
}

TEST(MnistErrors, DamagedGzip) {
  const std::string images = Gzip(Images(3)), labels = Gzip(Labels(3));
  EXPECT_EQ(ErrorOf(Images(3), labels, ".gz"),
            "FOLDER/train-images-idx3-ubyte.gz: is named .gz, but is not a gzip file; fetch the "
            "file again");
  EXPECT_EQ(ErrorOf(images.substr(0, images.size() - 9), labels, ".gz"),
            "FOLDER/train-images-idx3-ubyte.gz: the gzip file is cut off; fetch the file again");
  std::string wrong_sum = images;
  wrong_sum[wrong_sum.size() - 8] ^= 1;
  EXPECT_EQ(ErrorOf(wrong_sum, labels, ".gz"),
            "FOLDER/train-images-idx3-ubyte.gz: the gzip file is damaged (incorrect data check); "
            "fetch the file again");
}

TEST(MnistErrors, FilesThatDoNotFitTogether) {
  EXPECT_EQ(ErrorOf(Images(3), Labels(4)),
            "mnist: FOLDER/train-images-idx3-ubyte holds 3 images, but "
            "FOLDER/train-labels-idx1-ubyte holds 4 labels: these files do not belong together");
  EXPECT_EQ(ErrorOf(Idx({1, 2, 3}, "abcdef"), Labels(1)),
            "FOLDER/train-images-idx3-ubyte: images are 2 x 3, but those of MNIST are 28 x 28");
  EXPECT_EQ(ErrorOf(Images(0), Labels(0)), "FOLDER/train-images-idx3-ubyte: holds no image");
}

TEST(MnistErrors, LabelsOutOfRange) {
  EXPECT_EQ(ErrorOf(Images(3), Idx({3}, "\x09\x0a\xff")),
            "FOLDER/train-labels-idx1-ubyte: label 1 is 10, but there are classes 0 to 9 only");
  EXPECT_EQ(ErrorOf(Images(1), Idx({1}, "\xff")),
            "FOLDER/train-labels-idx1-ubyte: label 0 is 255, but there are classes 0 to 9 only");
}

TEST(MnistErrors, MissingFiles) {
  const std::string folder = Folder({{"t10k-images-idx3-ubyte", Images(1)}});
  EXPECT_EQ(Open({.directory = folder, .split = Split::kTest}).status(),
            absl::NotFoundError(absl::StrCat(
                "mnist: no t10k-labels-idx1-ubyte, with or without .gz, in '", folder,
                "'. Name the directory that holds the IDX files of MNIST or Fashion-MNIST "
                "(--data=DIR).")));
  EXPECT_EQ(Open({.directory = "/no/such"}).status().code(), absl::StatusCode::kNotFound);
}

TEST(MnistErrors, AFileThatCannotBeRead) {
  const std::string folder = Folder({{"train-labels-idx1-ubyte", Labels(1)}});
  std::filesystem::create_directory(folder + "/train-images-idx3-ubyte");
  EXPECT_EQ(Open({.directory = folder}).status(),
            absl::DataLossError(absl::StrCat(folder, "/train-images-idx3-ubyte: Is a directory")));
}

// The data that all tutorials train on; where it is not installed, the error says what to do.
TEST(MnistDefault, IsFashionMnistOrSaysWhatToInstall) {
  auto train = Open({});
  if (!std::filesystem::exists(mnist::kDefaultDirectory)) {
    EXPECT_EQ(train.status(),
              absl::NotFoundError(
                  "mnist: no train-images-idx3-ubyte, with or without .gz, in "
                  "'/usr/share/datasets/fashion-mnist'. Install the Debian package "
                  "dataset-fashion-mnist (tools/bazel does), or name the directory that holds the "
                  "IDX files of MNIST or Fashion-MNIST (--data=DIR)."));
    return;
  }
  ASSERT_EQ(train.status(), absl::OkStatus());
  EXPECT_EQ((*train)->size(), 60'000);
  auto test = Open({.split = Split::kTest});
  ASSERT_EQ(test.status(), absl::OkStatus());
  EXPECT_EQ((*test)->size(), 10'000);
  Batch batch;
  ASSERT_EQ((*train)->ReadInto({0, 59'999}, batch), absl::OkStatus());
  EXPECT_EQ(batch["labels"].const_data_ptr<int64_t>()[0], 9) << "an ankle boot";
  EXPECT_EQ(batch["labels"].const_data_ptr<int64_t>()[1], 5) << "a sandal";
}

}  // namespace
}  // namespace lockstep::data
