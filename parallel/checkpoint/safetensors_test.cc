#include "lockstep/parallel/checkpoint/safetensors.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <sys/resource.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace lockstep::parallel::checkpoint {
namespace {

using testing::HasSubstr;
using testing::UnorderedElementsAre;

constexpr int kPythonValueBytes = 207;
constexpr char kPythonFile[] = "parallel/checkpoint/testdata/python.safetensors";

std::string Temporary(const std::string& name) {
  return absl::StrCat(std::getenv("TEST_TMPDIR"), "/", name);
}

std::string Content(const std::string& path) {
  std::ostringstream content;
  content << std::ifstream(path, std::ios::binary).rdbuf();
  return content.str();
}

std::string FileWith(const std::string& content) {
  const std::string path = Temporary("made.safetensors");
  std::ofstream(path, std::ios::binary) << content;
  return path;
}

// A file with this header and number of bytes of values.
std::string FileWith(const std::string& header, int value_bytes) {
  std::string content;
  for (int byte = 0; byte < 8; ++byte) {
    content.push_back(static_cast<char>(header.size() >> (8 * byte)));
  }
  return FileWith(content + header + std::string(value_bytes, 'v'));
}

// Why ReadSafetensors refuses a file, without its path.
std::string Refusal(const std::string& path) {
  const absl::Status status = ReadSafetensors(path).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  const std::string message{status.message()};
  EXPECT_EQ(message.substr(0, path.size() + 2), path + ": ");
  return message.substr(std::min(message.size(), path.size() + 2));
}

std::map<std::string, at::Tensor> ByName(const SafetensorsFile& file) {
  return {file.tensors.begin(), file.tensors.end()};
}

TEST(Safetensors, ReadsWhatPythonWrote) {
  auto file = ReadSafetensors(kPythonFile);
  ASSERT_EQ(file.status(), absl::OkStatus());
  EXPECT_EQ(file->metadata, (Metadata{{"format", "pt"}}));
  auto tensors = ByName(*file);
  EXPECT_EQ(tensors.size(), 20);
  for (const auto& [name, dtype] :
       std::map<std::string, at::ScalarType>{{"float64", at::kDouble},
                                             {"float32", at::kFloat},
                                             {"float16", at::kHalf},
                                             {"bfloat16", at::kBFloat16},
                                             {"float8_e4m3fn", at::kFloat8_e4m3fn},
                                             {"float8_e5m2", at::kFloat8_e5m2},
                                             {"complex64", at::kComplexFloat},
                                             {"int64", at::kLong},
                                             {"int32", at::kInt},
                                             {"int16", at::kShort},
                                             {"int8", at::kChar},
                                             {"uint8", at::kByte},
                                             {"uint16", at::kUInt16},
                                             {"uint32", at::kUInt32},
                                             {"uint64", at::kUInt64}}) {
    const at::Tensor& tensor = tensors["a." + name];
    ASSERT_TRUE(tensor.defined()) << name;
    EXPECT_EQ(tensor.scalar_type(), dtype) << name;
    const at::ScalarType plain = dtype == at::kComplexFloat ? dtype : at::kDouble;
    EXPECT_TRUE(at::equal(tensor.to(plain), at::arange(3).to(plain))) << name;
  }
  EXPECT_EQ(tensors["a.bool"].scalar_type(), at::kBool);
  EXPECT_TRUE(at::equal(tensors["a.bool"].to(at::kLong), at::arange(3).clamp_max(1)));
  EXPECT_TRUE(at::equal(tensors["matrix"], at::arange(6, at::kFloat).view({2, 3}) / 4));
  EXPECT_EQ(tensors["scalar"].dim(), 0);
  EXPECT_EQ(tensors["scalar"].item<float>(), 2.5f);
  EXPECT_EQ(tensors["empty"].sizes(), at::IntArrayRef({0, 3}));
  EXPECT_EQ(tensors["größe \"x\""].item<int64_t>(), -1);
}

// As Python's own writer makes the same bytes, Python reads what is written here.
TEST(Safetensors, WritesTheBytesThatPythonWrote) {
  auto file = ReadSafetensors(kPythonFile);
  ASSERT_EQ(file.status(), absl::OkStatus());
  std::reverse(file->tensors.begin(), file->tensors.end());
  const std::string path = Temporary("again.safetensors");
  ASSERT_EQ(WriteSafetensors(path, file->tensors, file->metadata), absl::OkStatus());
  EXPECT_EQ(Content(path), Content(kPythonFile));
}

TEST(Safetensors, WritesNonContiguousTensorsAndNoneAtAll) {
  const std::string path = Temporary("x.safetensors");
  const at::Tensor matrix = at::arange(12, at::kFloat).view({3, 4});
  ASSERT_EQ(WriteSafetensors(path, {{"t", matrix.t()}, {"column", matrix.select(1, 2)}}),
            absl::OkStatus());
  auto tensors = ByName(*ReadSafetensors(path));
  EXPECT_TRUE(at::equal(tensors["t"], matrix.t()));
  EXPECT_TRUE(at::equal(tensors["column"], matrix.select(1, 2)));
  ASSERT_EQ(WriteSafetensors(path, {}), absl::OkStatus());
  EXPECT_EQ(Content(path), std::string("\x08\0\0\0\0\0\0\0{}      ", 16)) << "as in Python";
  EXPECT_TRUE(ReadSafetensors(path)->tensors.empty());
}

TEST(Safetensors, RefusesToWriteWhatCannotBeRead) {
  const std::string path = Temporary("none.safetensors");
  const at::Tensor one = at::zeros({1});
  auto error = [&](const NamedTensors& tensors) {
    const absl::Status status = WriteSafetensors(path, tensors);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string{status.message()};
  };
  EXPECT_EQ(error({{"a", one}, {"a", one}}), path + ": tensor 'a' is given twice");
  EXPECT_EQ(error({{"a", at::Tensor()}}), path + ": tensor 'a' is undefined");
  EXPECT_EQ(error({{"__metadata__", one}}),
            path + ": tensor '__metadata__' has a name that the format reserves");
  EXPECT_EQ(error({{"a", one.to(at::kComplexDouble)}}),
            path + ": tensor 'a' has type ComplexDouble, which safetensors files cannot hold");
  EXPECT_THAT(error({{"a\xff", one}}), HasSubstr("names and metadata must be UTF-8"));
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(Safetensors, WritesAllOrNothing) {
  const std::string folder = Temporary("folder");
  std::filesystem::create_directory(folder);
  const std::string path = folder + "/x.safetensors";
  ASSERT_EQ(WriteSafetensors(path, {{"a", at::full({3}, 1)}}), absl::OkStatus());
  const std::string before = Content(path);
  EXPECT_EQ(WriteSafetensors(path, {{"a", at::full({3}, 2).to(at::kComplexDouble)}}).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Content(path), before);
  ASSERT_EQ(WriteSafetensors(path, {{"a", at::full({3}, 2)}}), absl::OkStatus());
  EXPECT_NE(Content(path), before);

  std::filesystem::create_directories(folder + "/taken/y");
  EXPECT_EQ(
      WriteSafetensors(folder + "/taken", {{"a", at::zeros({3})}}),
      absl::FailedPreconditionError(folder + "/taken: cannot replace it: it is no regular file"));
  std::vector<std::string> left;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    left.push_back(entry.path().filename());
  }
  EXPECT_THAT(left, UnorderedElementsAre("x.safetensors", "taken"));
  EXPECT_EQ(WriteSafetensors("/no/such/x", {}),
            absl::NotFoundError("/no/such/x: cannot create it: No such file or directory"));
}

TEST(Safetensors, ADiskThatIsFullLeavesNothingBehind) {
  const std::string folder = Temporary("full");
  std::filesystem::create_directory(folder);
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit small = {.rlim_cur = 4096, .rlim_max = before.rlim_max};
  std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const absl::Status status = WriteSafetensors(folder + "/x", {{"a", at::zeros({4096})}});
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_EQ(status, absl::ResourceExhaustedError(folder + "/x: cannot write it: File too large"));
  EXPECT_TRUE(std::filesystem::is_empty(folder));
}

TEST(SafetensorsErrors, FilesThatAreNotThere) {
  EXPECT_EQ(ReadSafetensors("/no/such").status(),
            absl::NotFoundError("/no/such: No such file or directory"));
  const std::string folder = std::getenv("TEST_TMPDIR");
  EXPECT_EQ(ReadSafetensors(folder).status(), absl::DataLossError(folder + ": Is a directory"));
}

TEST(SafetensorsErrors, TruncatedAtEveryByte) {
  const std::string whole = Content(kPythonFile);
  ASSERT_GT(whole.size(), 1000);
  for (size_t bytes = 0; bytes < whole.size(); ++bytes) {
    EXPECT_THAT(Refusal(FileWith(whole.substr(0, bytes))), HasSubstr("is cut off")) << bytes;
  }
  EXPECT_EQ(Refusal(FileWith("1234")), "is cut off: 4 bytes are not even the length of the header");
  EXPECT_EQ(Refusal(FileWith(whole + "x")),
            "header: tensors end at 207, but the file holds 208 bytes of values");
}

TEST(SafetensorsErrors, AnyByteOfTheHeaderChanged) {
  const std::string whole = Content(kPythonFile);
  for (size_t i = 0; i < whole.size() - kPythonValueBytes; ++i) {
    std::string changed = whole;
    changed[i] ^= 0x15;
    auto file = ReadSafetensors(FileWith(changed));  // right or refused, but no crash
    if (!file.ok()) {
      EXPECT_EQ(file.status().code(), absl::StatusCode::kDataLoss) << i;
    }
  }
}

TEST(SafetensorsErrors, BadHeaders) {
  EXPECT_THAT(Refusal(FileWith("<html>404 Not Found</html>")),
              HasSubstr("is no safetensors file: its header would have "));
  EXPECT_THAT(Refusal(FileWith("{", 0)), HasSubstr("header: is not JSON: "));
  EXPECT_EQ(Refusal(FileWith("[1]", 0)), "header: is not a JSON object");
  EXPECT_EQ(Refusal(FileWith(R"({"a":7})", 0)), "header: tensor 'a' has no dtype");
  EXPECT_EQ(Refusal(FileWith(R"({"a":{"dtype":"F32","shape":[1]}})", 4)),
            "header: tensor 'a' has no data_offsets");
  EXPECT_EQ(Refusal(FileWith(R"({"__metadata__":{"x":1}})", 0)),
            "header: __metadata__ 'x' is not a string");
  EXPECT_EQ(Refusal(FileWith(R"({"__metadata__":1})", 0)), "header: __metadata__ is not an object");
}

std::string Entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return absl::StrCat("\"", name, "\":{\"dtype\":\"", dtype, "\",\"shape\":", shape,
                      ",\"data_offsets\":", offsets, "}");
}

TEST(SafetensorsErrors, BadTensors) {
  auto refusal = [](const std::string& entries, int value_bytes) {
    return Refusal(FileWith("{" + entries + "}", value_bytes));
  };
  EXPECT_EQ(refusal(Entry("a", "F31", "[1]", "[0,4]"), 4),
            "header: tensor 'a' has unknown dtype \"F31\"");
  for (const char* shape : {"[-1]", "[1.5]", "7", "[\"1\"]", "[9223372036854775808]"}) {
    EXPECT_EQ(refusal(Entry("a", "F32", shape, "[0,4]"), 4),
              absl::StrCat("header: tensor 'a' has a bad shape ", shape));
  }
  for (const char* offsets : {"[4,0]", "[0]", "[0,4,8]", "[-4,0]", "null"}) {
    EXPECT_EQ(refusal(Entry("a", "F32", "[1]", offsets), 4),
              absl::StrCat("header: tensor 'a' has bad data_offsets ", offsets));
  }
  for (const char* shape : {"[2]", "[0]", "[4294967296,4294967296]"}) {
    EXPECT_EQ(refusal(Entry("a", "F32", shape, "[0,4]"), 4),
              absl::StrCat("header: tensor 'a' of F32 ", shape,
                           " does not take the 4 bytes between its data_offsets"));
  }
  const std::string a = Entry("a", "F32", "[1]", "[0,4]");
  EXPECT_EQ(refusal(a + "," + a, 4), "header: the name 'a' occurs twice");
  EXPECT_EQ(refusal(a + "," + Entry("b", "F32", "[1]", "[3,7]"), 7),
            "header: tensor 'b' has values from 3 to 7, which overlap those of another");
  EXPECT_EQ(refusal(a + "," + Entry("b", "F32", "[1]", "[5,9]"), 9),
            "header: tensor 'b' has values from 5 to 9, which leaves a gap from 4");
  EXPECT_EQ(refusal(a + "," + Entry("b", "F32", "[1]", "[4,8]"), 7),
            "header: tensor 'b' has values from 4 to 8, but the file holds 7 bytes of values: it "
            "is cut off");
}

TEST(LoadInto, MovesAModuleByName) {
  const std::string path = Temporary("module.safetensors");
  torch::nn::BatchNorm1d source(3), target(3);
  source->running_mean.fill_(7);
  source->weight.data().fill_(5);
  ASSERT_EQ(SaveModule(*source, path), absl::OkStatus());
  const at::Tensor weight = target->weight;
  ASSERT_EQ(LoadInto(*target, path), absl::OkStatus());
  EXPECT_TRUE(at::equal(weight, at::full({3}, 5.0f))) << "the same tensor, with other values";
  EXPECT_TRUE(weight.requires_grad());
  EXPECT_TRUE(at::equal(target->running_mean, at::full({3}, 7.0f)));
}

TEST(LoadInto, NamesTheFirstThatDiffersAndChangesNothing) {
  const std::string path = Temporary("module.safetensors");
  torch::nn::Linear module(2, 3);
  const at::Tensor weight = module->weight.detach().clone();
  auto error = [&](const NamedTensors& tensors) {
    EXPECT_EQ(WriteSafetensors(path, tensors), absl::OkStatus());
    const absl::Status status = LoadInto(*module, path);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(at::equal(module->weight, weight));
    return std::string{status.message()};
  };
  const at::Tensor good_weight = at::zeros({3, 2}), good_bias = at::zeros({3});
  EXPECT_EQ(error({{"weight", good_weight}}),
            path + ": has no tensor 'bias', which the module has");
  EXPECT_EQ(error({{"weight", good_weight}, {"bias", good_bias}, {"extra", good_bias}}),
            path + ": has a tensor 'extra', which the module does not have");
  EXPECT_EQ(error({{"weight", at::zeros({2, 3})}, {"bias", good_bias}}),
            path + ": tensor 'weight' is Float [2, 3], but the module's is Float [3, 2]");
  EXPECT_EQ(error({{"weight", good_weight}, {"bias", good_bias.to(at::kDouble)}}),
            path + ": tensor 'bias' is Double [3], but the module's is Float [3]");
  EXPECT_EQ(LoadInto(*module, "/no/such").code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace lockstep::parallel::checkpoint
