// How far ranks may run ahead of each other. The model of the protocol puts a smaller number here.
#pragma once

namespace shardcomm {

// All ranks meet at least once in so many calls. So where ranks share a core, it goes from one to
// the next at least that often.
inline constexpr int kStretch = 16;

}  // namespace shardcomm
