// How far ranks may run ahead of each other. The model of the protocol puts a smaller number here.
#pragma once

namespace shardcomm {

// All ranks meet in one of so many calls at least. Ranks that share cores change places as often.
inline constexpr int kStretch = 16;

}  // namespace shardcomm
