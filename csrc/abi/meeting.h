// How the ranks of a C program find each other: by the bytes of an id.
#pragma once

#include <memory>

#include "abi/handles.h"
#include "shardcomm.h"

namespace shardcomm::abi {

// Begins a group of `size` ranks, and keeps what they need to come, until they have.
shc_unique_id begin_group(shc_transport transport, int size);

// Collective: returns when all ranks have come.
std::unique_ptr<shc_comm> join_group(const shc_unique_id& id, int rank, int size,
                                     const shc_comm_options& options);

}  // namespace shardcomm::abi
