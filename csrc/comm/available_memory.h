// How much memory this process may still take.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>

namespace shardcomm {

// The bytes that could be taken without driving other programs out of memory, and without coming
// over the limit of a memory cgroup that this process is in, as a container is: past that the
// kernel ends a process of its choice. nullopt if nobody says. `root` has proc and sys in it.
//
// Files: Linux's Documentation/filesystems/proc.rst (MemAvailable),
// Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
std::optional<std::size_t> available_memory(const std::filesystem::path& root = "/");

}  // namespace shardcomm
