// Memory of the host as a capsule for torch.from_dlpack: a flat tensor of bytes.
//
// A tensor of torch.frombuffer takes the interpreter's lock when it goes. Threads of torch's, such
// as Gloo's, may be the last to drop one, and if the interpreter ends just then, the process ends
// with SIGABRT (see lock.h). A tensor of DLPack goes without the lock.
#pragma once

#include <cstddef>
#include <memory>

#include "bindings/bindings.h"

namespace shardcomm::bindings {

// `owner` goes with the tensor, on whatever thread that is; with none, the caller keeps the memory.
py::capsule as_dlpack(void* data, std::size_t bytes, std::shared_ptr<void> owner = nullptr);

}  // namespace shardcomm::bindings
