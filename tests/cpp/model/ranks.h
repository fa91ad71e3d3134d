// Ranks over the real Board and Group, in memory of the explorer's, and what must hold of them.
//
//   P1  While a deadline exists, no wait is without end: every rank that lives and runs returns or
//       throws.
//   P2  No failure is lost. The first one stays; once a rank has thrown, no later call succeeds on
//       any rank; and nobody returns from a meeting to which not all have come.
//   P3  Every rank names the first failure: the same trouble, the same rank, and one that is to
//       blame.
//   P4  Nobody sees a torn call, or another than the one that was to be compared.
//   P5  Memory that others read by its address is not let go of while one may read it.
//   P6  What a rank wrote before a meeting, all see after it, and no two accesses race.
//   P7  Where nobody fails no rank's sleep has to time out; and who fails wakes those who sleep.
#pragma once

#include <array>
#include <functional>
#include <optional>
#include <string>

#include "comm/board.h"
#include "comm/group.h"
#include "comm/mail_ring.h"
#include "comm/staging.h"
#include "explorer.h"
#include "stream/wait_check.h"

namespace model {

using shardcomm::Trouble;

constexpr int kChannels = 2;
constexpr int kGather = 0;
constexpr int kReduce = 1;

// How a collective moves its bytes; after board_gather.cpp and board_reduce.cpp.
enum class Form : std::uint8_t {
  barrier,
  staged,  // through areas of each rank, of two halves
  filled,  // the same, filled before the call is posted
  few,     // beside the root's call, for which alone the others wait
  window,  // into memory that all share
  direct,  // out of the others' operands, by their addresses
  chunks,  // through the halves of areas: of each chunk, a rank reduces its share
  shares,  // the same, for all
  sharing  // none: all have written their shares of a window before they come
};

inline std::string rank_name(int rank) { return "rank " + std::to_string(rank); }

class Ranks;

struct Program {
  std::string name;
  int ranks = 2;
  World world;
  std::function<void(Ranks&)> spawn_threads;
  bool is_small = false;  // part of the small form
  Mask troubles = 0;      // those that may end it, by 1 << Trouble
  bool calls_differ = false;
  bool windows_differ = false;  // of which ranks have written shares
  bool all_throw = false;       // on every rank
  bool reads_addresses = false;
  int chunks = 0;             // of each call whose form is `chunks` or `shares`; 0: no call's is
  bool word_by_word = false;  // a call is posted and read a word at a time; else at once
  bool without_timeouts = false;  // P7
};

constexpr Mask may(Trouble trouble) { return 1U << static_cast<unsigned>(trouble); }

class Ranks final : public Scenario {
 public:
  explicit Ranks(const Program& program) : program_(program) {}

  // For programs, before the run: a thread of a rank. `channels`: those that it is known to use.
  void thread(int rank, Mask channels, std::function<void()> body);
  int size() const { return program_.ranks; }

  // For their threads. Whether the collective ended well; `variant` is what ranks compare, and the
  // root.
  bool collective(int rank, int channel, Form form, int variant = 0);
  void close(int rank);
  void abort(int rank);
  void interrupt(int rank);  // what waits on this rank ends in an exception of its own
  void post(int calls);      // into a place that `read_posted` reads
  void read_posted(int times);
  void look_at(int rank, int of);  // as whoever asks what another rank is in
  void write_mail(int frames);     // through a ring that has room for one, to `read_mail`
  void read_mail(int frames);

  void check_interrupt() const;  // of the running thread's rank

  World world() const override { return program_.world; }
  void start() override;
  void look(int thread) override;
  void time_passes() override;
  void died(int rank) override;
  void ended() override;
  std::uint64_t hash() const override;
  std::uint64_t significant(const void* word, std::uint64_t value) const override;
  bool is_quiet(const void* word) const override;
  std::string name_of(const void* word) const override;
  bool ends_without_timeouts() const override { return program_.without_timeouts; }

 private:
  using Call = shardcomm::Call;
  using Value = shardcomm::Plain<std::uint64_t>;
  struct Member {
    shardcomm::Group* group = nullptr;
    std::array<shardcomm::Board*, kChannels> boards{};
    std::array<Value*, kChannels> operands{};
    std::array<Value*, kChannels> window{};                 // its slice
    shardcomm::Staging* staging = nullptr;                  // of reduces
    std::array<std::array<Value*, kMostRanks>, 2> areas{};  // each half has a share for each rank
  };
  // What the checks remember. Plain data, so that a run begins with all of it zero.
  struct RankMemory {
    bool aborts;
    bool closes;  // has begun to
    bool closed;
    bool threw;
    std::array<std::uint32_t, kChannels> meetings;    // that it has gone to,
    std::array<std::uint32_t, kChannels> passed;      // and come out of
    std::array<Mask, kChannels> awaits;               // whom, in the latest
    std::array<std::uint32_t, kChannels> in_stretch;  // calls, before the present one
    std::array<std::uint32_t, kChannels> passed_before_close;
    std::array<std::uint64_t, kChannels> calls;
    std::array<bool, kChannels> operand_alive;
    std::array<Mask, kChannels> operand_read_by;
  };
  struct ThreadMemory {
    std::uint64_t operations;
    int channel;
    std::uint32_t meeting;                            // 0: in none
    Mask missing;                                     // when its deadline passed: who had not come,
    std::array<std::uint32_t, kMostRanks> elsewhere;  // and who waited in which other meeting
  };
  struct Memory {
    std::array<RankMemory, kMostRanks> ranks;
    std::array<ThreadMemory, kMostThreads> threads;
    std::uint64_t failure;
    std::uint64_t closed;  // ranks
    std::uint64_t failed;  // a rank has thrown
  };

  void operation(std::uint64_t locals);
  void sleep_until(shardcomm::Doorbell& bell, const std::function<bool()>& is_done);
  Mask everyone() const { return (1U << program_.ranks) - 1; }
  // `awaited`: those for whom the rank waits.
  void meeting(int rank, int channel, Mask awaited, const std::function<void()>& go);
  // The same in two steps.
  void begin_meeting(int rank, int channel, Mask awaited);
  void end_meeting(int rank, int channel);
  void move_bytes(int rank, int channel, Form form, std::uint64_t sequence, std::uint64_t locals);
  void lay_out_areas();
  // As `rank` sees it, a share of the present chunk in the area of rank `of`.
  Value& share(int rank, int of, int share) const;
  // All shares but its own.
  void fill_area(int rank, std::uint64_t sequence, std::int64_t chunk);
  void move_chunks(int rank, Form form, std::uint64_t sequence, std::uint64_t locals);
  void read_operand(int rank, int channel, int of, std::uint64_t sequence);
  void free_operand(int rank, int channel);
  static Value& elements(const shardcomm::Board& board, int rank);
  void expect(const Value& value, std::uint64_t sequence) const;
  Call call_by(int rank, int channel, std::uint64_t sequence, int variant, bool is_sharing) const;
  void check_call(const Call& call, int rank, int channel, const char* where) const;
  void check_error(const std::string& text, int rank) const;
  void check_failure(int reporter_thread) const;
  bool has_come(int rank, int channel, std::uint32_t meeting) const;
  std::uint32_t waits_in(int rank, int channel) const;

  const Program& program_;
  shardcomm::GroupMemory* group_ = nullptr;
  std::array<shardcomm::BoardMemory*, kChannels> boards_{};
  std::array<Member, kMostRanks> members_{};
  shardcomm::Atomic<std::uint32_t>* deaths_ = nullptr;      // for each rank
  shardcomm::Atomic<std::uint32_t>* interrupts_ = nullptr;  // for each rank
  shardcomm::Atomic<std::uint32_t>* users_ = nullptr;       // the thread of a rank's channel
  shardcomm::PostedCall* posted_ = nullptr;
  shardcomm::Doorbell* bells_ = nullptr;  // of ranks 0 and 1
  shardcomm::MailWriter* writer_ = nullptr;
  shardcomm::MailReader* reader_ = nullptr;
  Memory memory_{};
};

}  // namespace model
