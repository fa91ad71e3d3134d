// How the C functions of a collective run or bind it.
#pragma once

#include <memory>

#include "abi/arguments.h"
#include "abi/handles.h"
#include "abi/status.h"
#include "shardcomm.h"

namespace shardcomm::abi {

// Runs a collective: at once by `call` or, on a stream, what `bind` binds.
template <class Call, class Bind>
void run_now_or_on(shc_stream* stream, const shc_comm& comm, Call&& call, Bind&& bind) {
  if (stream == nullptr) return call();  // binding takes memory, and time
  run_on(stream, comm.device, bind());
}

// Gives the caller the collective that `bind` binds. It is the whole of the C function of this
// name.
template <class Bind>
shc_status hand_over_bound(const char* function, shc_comm* comm, shc_collective** collective,
                           Bind&& bind) {
  return guarded(function, [&] {
    shc_collective*& result = required(collective, "collective");
    const shc_comm& known = checked(comm, "comm");
    hand_over(result, std::make_unique<shc_collective>(bind(known), known.device));
  });
}

}  // namespace shardcomm::abi
