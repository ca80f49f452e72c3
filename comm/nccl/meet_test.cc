#include "lockstep/comm/nccl/meet.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>

namespace lockstep::comm::nccl {
namespace {

constexpr absl::Duration kTimeout = absl::Seconds(20);

int FreePort() { return (*Store::Serve(/*port=*/0))->port(); }

launch::World Rank(int rank, int port) {
  launch::World world;
  world.rank = rank;
  world.size = 2;
  world.launcher = launch::Launcher::kTorchrun;
  world.store = launch::StoreAddress{"127.0.0.1", port};
  return world;
}

launch::Environment Torchrun(const std::string& attempt) {
  return [attempt](const std::string& name) -> std::optional<std::string> {
    if (name == "TORCHELASTIC_USE_AGENT_STORE") return "True";
    if (name == "TORCHELASTIC_RESTART_COUNT") return attempt;
    return std::nullopt;
  };
}

std::optional<std::string> Nothing(const std::string& /*name*/) { return std::nullopt; }

TEST(Meet, EachMeetingHasKeysOfItsOwn) {
  const int port = FreePort();
  for (const std::string id : {"first", "second", "third"}) {
    const auto zero = Meet(Rank(0, port), kTimeout, Nothing);
    const auto one = Meet(Rank(1, port), kTimeout, Nothing);
    ASSERT_TRUE(zero.ok()) << zero.status();
    ASSERT_TRUE(one.ok()) << one.status();
    EXPECT_EQ(*(*one)->TryGet("id"), std::nullopt);
    ASSERT_TRUE((*zero)->Set("id", id).ok());
    EXPECT_EQ(*(*one)->Get("id", kTimeout), id);
  }
}

TEST(Meet, UsesTheStoreThatTorchrunServes) {
  const auto agent = Store::Serve(/*port=*/0);
  ASSERT_TRUE(agent.ok()) << agent.status();
  const int port = (*agent)->port();
  const auto zero = Meet(Rank(0, port), kTimeout, Torchrun("0"));
  const auto one = Meet(Rank(1, port), kTimeout, Torchrun("0"));
  ASSERT_TRUE(zero.ok()) << zero.status();
  ASSERT_TRUE(one.ok()) << one.status();
  ASSERT_TRUE((*zero)->Set("id", "x").ok());
  EXPECT_EQ(*(*one)->Get("id", kTimeout), "x");
  const auto again = Meet(Rank(0, port), kTimeout, Torchrun("1"));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(*(*again)->TryGet("id"), std::nullopt);
}

TEST(Meet, NeedsAnAddress) {
  launch::World world = Rank(0, 1);
  world.store.reset();
  EXPECT_EQ(Meet(world, kTimeout, Nothing).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace lockstep::comm::nccl
