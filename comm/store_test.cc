#include "lockstep/comm/store.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>

#include "absl/time/clock.h"

namespace lockstep::comm {
namespace {

void ExpectStoreWorks(Store& writer, Store& reader) {
  EXPECT_TRUE(writer.Set("key", std::string("a\0b", 3)).ok());
  EXPECT_EQ(*reader.Get("key", absl::Seconds(10)), std::string("a\0b", 3));
  EXPECT_EQ(*reader.TryGet("nothing"), std::nullopt);
  EXPECT_EQ(*writer.Add("counter", 2), 2);
  EXPECT_EQ(*reader.Add("counter", 3), 5);
  EXPECT_TRUE(writer.Delete("key").ok());
  EXPECT_EQ(*reader.TryGet("key"), std::nullopt);
  const absl::Status late = reader.Get("nothing", absl::Milliseconds(20)).status();
  EXPECT_EQ(late.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_NE(std::string{late.message()}.find("nobody set \"nothing\""), std::string::npos) << late;

  std::shared_ptr<Store> view = writer.WithPrefix("a/")->WithPrefix("b/");
  EXPECT_TRUE(view->Set("key", "below").ok());
  EXPECT_EQ(*reader.Get("a/b/key", absl::Seconds(10)), "below");

  std::thread later([&] {
    absl::SleepFor(absl::Milliseconds(30));
    EXPECT_TRUE(writer.Set("later", "here").ok());
  });
  EXPECT_EQ(*reader.Get("later", absl::Seconds(10)), "here");
  later.join();
}

TEST(StoreTest, WorksInProcess) {
  std::shared_ptr<Store> store = Store::InProcess();
  ExpectStoreWorks(*store, *store);
}

TEST(StoreTest, WorksOverTcp) {
  auto server = Store::Serve(/*port=*/0);
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_NE((*server)->port(), 0);
  auto client = Store::Connect("localhost", (*server)->port(), absl::Seconds(10));
  ASSERT_TRUE(client.ok()) << client.status();
  ExpectStoreWorks(**client, **server);
}

TEST(StoreTest, SaysThatNobodyServes) {
  int port = 0;
  {
    auto server = Store::Serve(/*port=*/0);
    ASSERT_TRUE(server.ok()) << server.status();
    port = (*server)->port();
  }
  auto client = Store::Connect("localhost", port, absl::Milliseconds(200));
  EXPECT_EQ(client.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(std::string{client.status().message()}.find("localhost:" + std::to_string(port)),
            std::string::npos)
      << client.status();
}

TEST(StoreTest, SaysThatTheServerHasGone) {
  auto server = Store::Serve(/*port=*/0);
  ASSERT_TRUE(server.ok()) << server.status();
  auto client = Store::Connect("localhost", (*server)->port(), absl::Seconds(10));
  ASSERT_TRUE(client.ok()) << client.status();
  server->reset();
  EXPECT_EQ((*client)->Add("key", 1).status().code(), absl::StatusCode::kUnavailable);
}

TEST(StoreTest, SaysThatThePortIsTaken) {
  auto first = Store::Serve(/*port=*/0);
  ASSERT_TRUE(first.ok()) << first.status();
  auto second = Store::Serve((*first)->port());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable) << second.status();
}

}  // namespace
}  // namespace lockstep::comm
