#include "lockstep/comm/mpi/arena.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "absl/strings/match.h"

namespace lockstep::comm::mpi {
namespace {

constexpr int64_t kPage = 4096;

std::unique_ptr<Arena> MakeArena(int64_t pages) {
  auto arena = Arena::Create(pages * kPage);
  EXPECT_TRUE(arena.ok()) << arena.status();
  return *std::move(arena);
}

TEST(ArenaTest, FreedNeighboursBecomeOneBlock) {
  constexpr int64_t kUnit = 9 << 20;
  const auto arena = MakeArena(1 + 4 * kUnit / kPage);
  char* blocks[4];
  for (char*& block : blocks) {
    block = static_cast<char*>(arena->Allocate(kUnit - 1));
    ASSERT_NE(block, nullptr);
    std::memset(block, 7, kUnit);
  }
  EXPECT_EQ(arena->Allocate(1), nullptr);
  for (int i : {0, 2}) arena->Free(blocks[i]);
  EXPECT_EQ(arena->Allocate(kUnit + 1), nullptr);  // they do not touch
  arena->Free(blocks[1]);
  char* large = static_cast<char*>(arena->Allocate(3 * kUnit));
  EXPECT_EQ(large, blocks[0]);
  EXPECT_EQ(large[0] + large[kUnit] + large[3 * kUnit - 1], 0);  // the system's pages are new
  arena->Free(blocks[3]);
  arena->Free(large);
  EXPECT_EQ(arena->Allocate(4 * kUnit), large);
}

TEST(ArenaTest, WhatWasFreedLastIsReusedAsItIs) {
  const auto arena = MakeArena(100);
  char* block = static_cast<char*>(arena->Allocate(3 * kPage));
  block[0] = 7;
  arena->Free(block);
  EXPECT_NE(arena->Allocate(2 * kPage), block);
  EXPECT_EQ(arena->Allocate(3 * kPage), block);
  EXPECT_EQ(block[0], 7);
}

TEST(ArenaTest, KeepsNoMoreThanWasOnceAllocated) {
  constexpr int64_t kUnit = 20 << 20;
  const auto arena = MakeArena(100 * kUnit / kPage);
  const auto used = [&] {
    struct stat status {};
    EXPECT_EQ(fstat(static_cast<int>(arena->handle().descriptor), &status), 0);
    return (status.st_blocks * 512 - kPage) / kUnit;
  };
  void* blocks[4];
  for (void*& block : blocks) block = arena->Allocate(kUnit);
  for (void* block : blocks) arena->Free(block);
  EXPECT_EQ(used(), 4);
  void* other = arena->Allocate(3 * kUnit);  // another size, so that it is none of the four
  EXPECT_EQ(used(), 4);
  void* more = arena->Allocate(2 * kUnit);
  EXPECT_EQ(used(), 6);  // 5, and one of the four: 20 of the least 32 MiB
  arena->Free(more);
  arena->Free(other);
  EXPECT_EQ(used(), 5);
}

TEST(ArenaTest, KnowsWhatIsItsOwn) {
  const auto arena = MakeArena(4);
  char* block = static_cast<char*>(arena->Allocate(3 * kPage));
  EXPECT_EQ(arena->OffsetOf(block), kPage);
  EXPECT_TRUE(arena->Contains(block, 3 * kPage));
  EXPECT_FALSE(arena->Contains(block, 3 * kPage + 1));
  EXPECT_FALSE(arena->Contains(arena->base() - 1, 1));
  const int other = 0;
  EXPECT_FALSE(arena->Contains(&other, sizeof(other)));
}

TEST(ArenaTest, AnotherProcessSeesIt) {
  const auto arena = MakeArena(1000);
  char* block = static_cast<char*>(arena->Allocate(kPage));
  std::strcpy(block, "ping");
  const pid_t child = fork();
  if (child == 0) {
    auto theirs = Arena::Map(arena->handle());
    if (!theirs.ok()) _exit(1);
    char* seen = *theirs + arena->OffsetOf(block);
    if (seen == block || std::string(seen) != "ping") _exit(2);
    std::strcpy(seen, "pong");
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_STREQ(block, "pong");
}

TEST(ArenaTest, RefusesToMapWhatIsSomethingElse) {
  const auto arena = MakeArena(2);
  Arena::Handle handle = arena->handle();
  handle.token[1] ^= 1;
  auto other = Arena::Map(handle);
  EXPECT_TRUE(absl::StrContains(other.status().ToString(), "is not that of the other rank"))
      << other.status();
  handle.descriptor = 1 << 30;
  auto missing = Arena::Map(handle);
  EXPECT_TRUE(absl::StrContains(missing.status().ToString(), "No such file or directory"))
      << missing.status();
}

TEST(ArenaTest, StaysBelowTheFileSizeLimit) {
  rlimit old{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
  const rlimit limit{5 * kPage, old.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  const auto arena = MakeArena(1000);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &old), 0);
  EXPECT_EQ(arena->handle().bytes, 5 * kPage);
  EXPECT_EQ(arena->Allocate(5 * kPage), nullptr);
  EXPECT_NE(arena->Allocate(4 * kPage), nullptr);
}

}  // namespace
}  // namespace lockstep::comm::mpi
