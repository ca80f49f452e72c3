// Headers of both projects that are called data/batch.h, in one file.
#include "data/batch.h"
#include "gtest/gtest.h"
#include "lockstep/data/batch.h"
#include "lockstep/tools/trace/memory.h"

namespace consumer {
namespace {

TEST(IncludeTest, HeadersOfOneNameCoexist) {
  lockstep::trace::InstallCountingAllocator();
  lockstep::data::Batch theirs;
  theirs.Reserve("x", {3, 257}, at::kFloat);
  const Batch ours{.rows = static_cast<int>(theirs.rows())};
  EXPECT_EQ(ours.rows, 3);
  EXPECT_EQ(lockstep::trace::GetMemory().live, 3 * 257 * 4);
}

}  // namespace
}  // namespace consumer
