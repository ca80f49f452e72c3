#pragma once

#include <memory>

#include "lockstep/data/dataset.h"
#include "lockstep/data/hdf5/shared.h"
#include "lockstep/data/row_order.h"

namespace lockstep::data::hdf5 {

// Reads along an order. One thread takes rows from the order and reads the blocks that they are in,
// as far ahead as there is memory; others decode them; who calls ReadInto takes rows from them.
std::unique_ptr<OrderedReader> MakeStream(Shared& shared, std::unique_ptr<RowOrder> order);

}  // namespace lockstep::data::hdf5
