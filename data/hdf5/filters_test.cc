#include "lockstep/data/hdf5/filters.h"

#include <zlib.h>

#include <algorithm>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace lockstep::data::hdf5 {
namespace {

std::vector<uint8_t> Numbers(size_t count) {
  std::vector<uint8_t> bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<uint8_t>(7 * i + i / 50);
  return bytes;
}

std::vector<uint8_t> Deflate(const std::vector<uint8_t>& plain) {
  uLongf size = compressBound(plain.size());
  std::vector<uint8_t> packed(size);
  compress2(packed.data(), &size, plain.data(), plain.size(), /*level=*/6);
  packed.resize(size);
  return packed;
}

std::vector<uint8_t> Shuffle(const std::vector<uint8_t>& plain, size_t element_bytes) {
  std::vector<uint8_t> shuffled(plain.size());
  const size_t count = plain.size() / element_bytes;
  for (size_t i = 0; i < plain.size(); ++i) {
    const bool rest = i >= count * element_bytes;
    shuffled[rest ? i : i % element_bytes * count + i / element_bytes] = plain[i];
  }
  return shuffled;
}

std::vector<uint8_t> WithSum(std::vector<uint8_t> plain) {
  const uint32_t sum = Fletcher32(plain);
  for (int shift : {0, 8, 16, 24}) plain.push_back(static_cast<uint8_t>(sum >> shift));
  return plain;
}

TEST(Filters, Fletcher32OfPublishedExamples) {
  // Worked by hand: words 0x6162 and 0x6364, then with a rest of one byte, 0x6500.
  const std::string text = "abcde";
  const auto sum = [&](size_t length) {
    return Fletcher32({reinterpret_cast<const uint8_t*>(text.data()), length});
  };
  EXPECT_EQ(sum(0), 0);
  EXPECT_EQ(sum(2), 0x61626162);
  EXPECT_EQ(sum(4), (0x6162u + 0xc4c6u - 0xffffu) << 16 | 0xc4c6);
  EXPECT_EQ(sum(5) & 0xffff, 0xc4c6u + 0x6500u - 0xffffu);
}

TEST(Filters, UnshuffleUndoesShuffle) {
  for (size_t count : {0, 1, 3, 16, 257, 4097}) {
    for (size_t element_bytes : {1, 2, 3, 4, 8, 10, 5000}) {
      const std::vector<uint8_t> plain = Numbers(count);
      std::vector<uint8_t> back(count);
      Unshuffle(Shuffle(plain, element_bytes), element_bytes, back.data());
      EXPECT_EQ(back, plain) << count << " bytes of " << element_bytes;
    }
  }
}

TEST(Filters, AnyOrderOfThem) {
  const std::vector<uint8_t> plain = Numbers(1003);
  const Filter deflate = {Filter::kDeflate}, sum = {Filter::kFletcher32},
               shuffle = {Filter::kShuffle, 4};
  std::vector<int> order = {0, 1, 2};
  Decoder decoder;
  do {
    std::vector<Filter> filters;
    std::vector<uint8_t> stored = plain;
    for (int kind : order) {
      filters.push_back(kind == 0 ? deflate : kind == 1 ? shuffle : sum);
      stored = kind == 0 ? Deflate(stored) : kind == 1 ? Shuffle(stored, 4) : WithSum(stored);
      std::vector<uint8_t> back(plain.size());
      EXPECT_EQ(decoder.Decode(filters, 0, stored, absl::MakeSpan(back)), "");
      EXPECT_EQ(back, plain) << order[0] << order[1] << order[2] << " up to " << filters.size();
    }
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(Filters, ThoseThatAChunkSkipped) {
  const std::vector<uint8_t> plain = Numbers(100);
  const std::vector<Filter> filters = {{Filter::kShuffle, 2}, {Filter::kDeflate}};
  Decoder decoder;
  std::vector<uint8_t> back(plain.size());
  EXPECT_EQ(decoder.Decode(filters, 0b10, Shuffle(plain, 2), absl::MakeSpan(back)), "");
  EXPECT_EQ(back, plain);
  back.assign(plain.size(), 0);
  EXPECT_EQ(decoder.Decode(filters, 0b01, Deflate(plain), absl::MakeSpan(back)), "");
  EXPECT_EQ(back, plain);
  back.assign(plain.size(), 0);
  EXPECT_EQ(decoder.Decode(filters, 0b11, plain, absl::MakeSpan(back)), "");
  EXPECT_EQ(back, plain);
}

TEST(Filters, AChecksumOfOldMachines) {
  std::vector<uint8_t> stored = WithSum(Numbers(101));
  std::swap(stored[101], stored[102]);
  std::swap(stored[103], stored[104]);
  Decoder decoder;
  std::vector<uint8_t> back(101);
  EXPECT_EQ(decoder.Decode({{Filter::kFletcher32}}, 0, stored, absl::MakeSpan(back)), "");
}

TEST(Filters, WhatIsWrong) {
  Decoder decoder;
  const auto wrong = [&](const std::vector<Filter>& filters, std::vector<uint8_t> stored) {
    std::vector<uint8_t> back(100);
    return decoder.Decode(filters, 0, stored, absl::MakeSpan(back));
  };
  const std::vector<Filter> deflate = {{Filter::kDeflate}}, sum = {{Filter::kFletcher32}},
                            shuffle = {{Filter::kShuffle, 2}};
  std::vector<uint8_t> packed = Deflate(Numbers(100));
  EXPECT_EQ(wrong(deflate, packed), "");
  EXPECT_EQ(wrong(deflate, Deflate(Numbers(101))), "it decompresses to more than its 100 bytes");
  EXPECT_EQ(wrong(deflate, Deflate(Numbers(99))), "it has 99 bytes and not 100");
  EXPECT_EQ(wrong(deflate, {packed.begin(), packed.end() - 5}),
            "its compressed bytes end too early");
  packed.back() ^= 1;
  EXPECT_EQ(wrong(deflate, packed), "its compressed bytes are damaged (incorrect data check)");
  EXPECT_EQ(wrong(deflate, Numbers(50)),
            "its compressed bytes are damaged (incorrect header check)");
  std::vector<uint8_t> summed = WithSum(Numbers(100));
  EXPECT_EQ(wrong(sum, summed), "");
  for (size_t i = 0; i < summed.size(); ++i) {
    summed[i] ^= 0x10;
    EXPECT_EQ(wrong(sum, summed), "its checksum is wrong") << i;
    summed[i] ^= 0x10;
  }
  EXPECT_EQ(wrong(sum, {1, 2, 3}), "it is too short to have a checksum");
  EXPECT_EQ(wrong(sum, WithSum(Numbers(98))), "it has 98 bytes and not 100");
  EXPECT_EQ(wrong(shuffle, Numbers(101)), "it has 101 bytes and not 100");
  EXPECT_EQ(wrong({}, Numbers(7)), "it has 7 bytes and not 100");
}

}  // namespace
}  // namespace lockstep::data::hdf5
