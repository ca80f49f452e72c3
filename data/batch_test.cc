#include "lockstep/data/batch.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lockstep/comm/testing/host_device.h"

namespace lockstep::data {
namespace {

using testing::ElementsAre;

TEST(Batch, KeepsFieldsInOrderAndFindsThemByName) {
  Batch batch;
  EXPECT_EQ(batch.rows(), 0);
  EXPECT_THAT(batch.names(), ElementsAre());
  batch.Reserve("labels", {3}, at::kLong);
  batch.Reserve("images", {3, 1, 5}, at::kFloat);
  EXPECT_THAT(batch.names(), ElementsAre("labels", "images"));
  EXPECT_EQ(batch.rows(), 3);
  EXPECT_EQ(batch["images"].sizes(), at::IntArrayRef({3, 1, 5}));
  EXPECT_EQ(batch["images"].scalar_type(), at::kFloat);
  EXPECT_EQ(batch["labels"].scalar_type(), at::kLong);
}

TEST(Batch, AnUnknownFieldIsAnErrorThatListsTheOthers) {
  Batch batch;
  auto message = [&batch](std::string name) -> std::string {
    try {
      batch[name];
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    return "";
  };
  EXPECT_EQ(message("image"), "the batch has no field 'image': it has none");
  batch.Reserve("images", {3}, at::kFloat);
  batch.Reserve("labels", {3}, at::kLong);
  EXPECT_EQ(message("image"), "the batch has no field 'image': it has images, labels");
}

TEST(Batch, UsesMemoryAgainWhereItSuffices) {
  Batch batch;
  const void* data = batch.Reserve("x", {257, 3}, at::kFloat).data_ptr();
  EXPECT_EQ(batch.Reserve("x", {257, 3}, at::kFloat).data_ptr(), data);
  EXPECT_EQ(batch.Reserve("x", {1, 3}, at::kFloat).data_ptr(), data);
  EXPECT_EQ(batch["x"].sizes(), at::IntArrayRef({1, 3}));
  EXPECT_EQ(batch.Reserve("x", {257, 3}, at::kFloat).data_ptr(), data);
  EXPECT_EQ(batch.Reserve("x", {257, 3}, at::kDouble).scalar_type(), at::kDouble);
  batch.Reserve("x", {4097}, at::kDouble).mutable_data_ptr<double>()[4096] = 1;
  EXPECT_TRUE(batch["x"].is_contiguous());
}

TEST(Batch, LeavesTensorsAloneThatSomebodyHolds) {
  Batch batch;
  auto fill = [&batch](float value) {
    at::Tensor x = batch.Reserve("x", {2, 2}, at::kFloat);
    for (int i = 0; i < 4; ++i) x.mutable_data_ptr<float>()[i] = value;
    return x.data_ptr();
  };
  fill(1);
  at::Tensor handle = batch["x"];
  const void* second = fill(2);
  EXPECT_NE(second, handle.data_ptr());
  EXPECT_EQ(handle.const_data_ptr<float>()[3], 1);
  at::Tensor view = batch["x"].select(0, 1);
  fill(3);
  EXPECT_EQ(view.const_data_ptr<float>()[1], 2);
  at::Tensor same_storage = at::empty({0}, at::kFloat).set_(batch["x"]);
  fill(4);
  EXPECT_EQ(same_storage.const_data_ptr<float>()[3], 3);
  const void* last = batch["x"].data_ptr();
  EXPECT_EQ(fill(5), last) << "held by nobody";
}

TEST(Batch, ReserveWaitsForTheCopiesToAllDevices) {
  Batch batch;
  batch.Reserve("x", {3}, at::kFloat).fill_(7);
  batch.Reserve("y", {3}, at::kFloat).fill_(8);
  const at::Tensor one = batch.To("x", comm::testing::HostDevice(1));
  const at::Tensor two = batch.To("x", comm::testing::HostDevice(2));
  batch.To("y", comm::testing::HostDevice(1));
  const int before = comm::testing::EventsWaitedFor();
  batch.Reserve("x", {3}, at::kFloat).fill_(9);
  EXPECT_EQ(comm::testing::EventsWaitedFor(), before + 2);
  EXPECT_EQ(one.cpu()[2].item<float>(), 7);
  EXPECT_EQ(two.cpu()[2].item<float>(), 7);
}

}  // namespace
}  // namespace lockstep::data
