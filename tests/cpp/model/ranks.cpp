#include "ranks.h"

#include <algorithm>
#include <new>

#include "shardcomm/error.h"

namespace model {
namespace {

using shardcomm::Atomic;
using shardcomm::Board;
using shardcomm::BoardMemory;
using shardcomm::CommError;
using shardcomm::Doorbell;
using shardcomm::Frame;
using shardcomm::Group;
using shardcomm::GroupMemory;
using shardcomm::kStretch;
using shardcomm::MailReader;
using shardcomm::MailRing;
using shardcomm::MailWriter;
using shardcomm::PostedCall;
using shardcomm::Staging;

struct Interrupted {};

// More than what passes where the clock is not let go on, less than what counts at most where it
// is.
constexpr double kDeadlineS = 0.05;

// Every field follows from who posted it, where, and as which: half of another shows. Every second
// tells no places.
shardcomm::Call make_call(int rank, int channel, std::uint64_t sequence, int variant) {
  shardcomm::Call call;
  call.op = channel == kGather ? shardcomm::Op::all_gather : shardcomm::Op::all_reduce;
  call.root = variant;
  call.count = 1000 * (1 + variant) + static_cast<std::int64_t>(sequence);
  call.sequence = sequence;
  if (sequence % 2 == 0) return call;
  call.handle =
      static_cast<std::uint64_t>(rank) << 32 | static_cast<std::uint64_t>(channel) << 16 | sequence;
  call.send = {shardcomm::Place::kAddress, static_cast<std::uint64_t>(rank)};
  call.recv = {static_cast<std::uint32_t>(call.count), call.handle + 1};
  return call;
}

// After a window was written in shares, of which `offset` tells where it lies.
shardcomm::Call make_sharing(std::uint64_t offset, std::uint64_t sequence, int variant) {
  shardcomm::Call call;
  call.op = shardcomm::Op::barrier;
  call.count = 1000 * (1 + variant) + static_cast<std::int64_t>(sequence);
  call.sequence = sequence;
  call.recv = {shardcomm::Place::kAddress + 1, offset};
  return call;
}

// What a rank writes of the `chunk`th chunk of a call, and what its share is reduced to.
std::uint64_t chunk_value(std::uint64_t sequence, std::int64_t chunk) {
  return sequence << 8 | static_cast<std::uint64_t>(chunk) << 1;
}
std::uint64_t reduced_value(std::uint64_t sequence, std::int64_t chunk) {
  return chunk_value(sequence, chunk) | 1;
}

template <class T>
T* make(std::size_t count = 1) {
  return static_cast<T*>(fresh_memory(sizeof(T) * count));
}

// As BoardMemory::Rank::came_to.
std::uint64_t came_to(const BoardMemory& board, int rank) {
  std::uint64_t latest = 0;
  for (const PostedCall& call : board.ranks[rank].calls) {
    latest = std::max(latest, call.arrival.now());
  }
  return latest;
}

const Ranks* running_ranks = nullptr;

}  // namespace

void Ranks::check_interrupt() const {
  if (interrupts_[rank_of(self())].load() != 0) throw Interrupted{};
}

void Ranks::start() {
  running_ranks = this;
  const auto size = static_cast<std::size_t>(program_.ranks);
  std::memset(static_cast<void*>(&memory_), 0, sizeof(memory_));
  group_ = static_cast<GroupMemory*>(fresh_memory(GroupMemory::bytes(program_.ranks)));
  for (BoardMemory*& board : boards_) {
    board = static_cast<BoardMemory*>(fresh_memory(BoardMemory::bytes(program_.ranks)));
  }
  deaths_ = make<Atomic<std::uint32_t>>(size);
  interrupts_ = make<Atomic<std::uint32_t>>(size);
  users_ = make<Atomic<std::uint32_t>>(size * kChannels);
  posted_ = make<PostedCall>();
  bells_ = make<Doorbell>(2);
  auto* ring = static_cast<MailRing*>(fresh_memory(MailRing::bytes(Frame::kAlign)));
  writer_ = new MailWriter(ring, Frame::kAlign, &bells_[1]);
  reader_ = new MailReader(ring, Frame::kAlign, &bells_[0]);
  if (program_.chunks > 0) lay_out_areas();
  for (int rank = 0; rank < program_.ranks; ++rank) {
    Member& member = members_[static_cast<std::size_t>(rank)];
    member.group = new Group(group_, boards_, rank, program_.ranks, kDeadlineS,
                             [this](int other) { return deaths_[other].load() != 0; });
    plain(&group_->ranks[rank].reason, "P6");
    for (int c = 0; c < kChannels; ++c) {
      const auto channel = static_cast<std::size_t>(c);
      // As BoardCommunicator and is_stuck: whether the other channel's thread is this one.
      Atomic<std::uint32_t>* other = &users_[rank * kChannels + 1 - c];
      member.boards[channel] = new Board(*member.group, c, program_.reads_addresses, [other] {
        return other->load() == static_cast<std::uint32_t>(self()) + 1;
      });
      member.operands[channel] = make<Value>();
      member.window[channel] = make<Value>();
      plain(member.operands[channel], "P5");
      plain(member.window[channel], "P6");
      for (PostedCall& posted : boards_[channel]->ranks[rank].calls) plain(posted.elements, "P6");
    }
    member.staging = new Staging(*member.boards[kReduce]);
  }
  program_.spawn_threads(*this);
}

void Ranks::lay_out_areas() {
  for (int rank = 0; rank < program_.ranks; ++rank) {
    for (auto& half : members_[static_cast<std::size_t>(rank)].areas) {
      for (int share = 0; share < program_.ranks; ++share) {
        Value*& place = half[static_cast<std::size_t>(share)];
        place = make<Value>();
        plain(place, "P6");
      }
    }
  }
}

void Ranks::thread(int rank, Mask channels, std::function<void()> body) {
  for (int c = 0; c < kChannels; ++c) {
    if (channels >> c & 1) {
      users_[rank * kChannels + c].store(static_cast<std::uint32_t>(threads()) + 1);
    }
  }
  spawn(rank, std::move(body));
}

// What this thread does next follows from `locals`, and from how many operations it has begun.
void Ranks::operation(std::uint64_t locals) {
  forget_all_but(mix(++memory_.threads[static_cast<std::size_t>(self())].operations, locals));
}

bool Ranks::has_come(int rank, int channel, std::uint32_t meeting) const {
  const BoardMemory& board = *boards_[static_cast<std::size_t>(channel)];
  return came_to(board, rank) >= meeting;
}

// The meeting in which it waits, or 0.
std::uint32_t Ranks::waits_in(int rank, int channel) const {
  const BoardMemory& board = *boards_[static_cast<std::size_t>(channel)];
  const auto meeting = static_cast<std::uint32_t>(came_to(board, rank));
  const RankMemory& own = memory_.ranks[static_cast<std::size_t>(rank)];
  const auto c = static_cast<std::size_t>(channel);
  if (own.meetings[c] != meeting) return 0;  // it is on its way to the next
  for (int r = 0; r < program_.ranks; ++r) {
    if ((own.awaits[c] >> r & 1) != 0 && !has_come(r, channel, meeting)) return meeting;
  }
  return 0;
}

void Ranks::meeting(int rank, int channel, Mask awaited, const std::function<void()>& go) {
  begin_meeting(rank, channel, awaited);
  go();
  end_meeting(rank, channel);
}

void Ranks::begin_meeting(int rank, int channel, Mask awaited) {
  const auto c = static_cast<std::size_t>(channel);
  RankMemory& own = memory_.ranks[static_cast<std::size_t>(rank)];
  ThreadMemory& thread = memory_.threads[static_cast<std::size_t>(self())];
  thread.channel = channel;
  own.awaits[c] = awaited;
  thread.meeting = ++own.meetings[c];
  thread.missing = 0;
  thread.elsewhere = {};
}

void Ranks::end_meeting(int rank, int channel) {
  const auto c = static_cast<std::size_t>(channel);
  RankMemory& own = memory_.ranks[static_cast<std::size_t>(rank)];
  ThreadMemory& thread = memory_.threads[static_cast<std::size_t>(self())];
  for (int r = 0; r < program_.ranks; ++r) {
    if ((own.awaits[c] >> r & 1) != 0 && !has_come(r, channel, thread.meeting)) {
      violate("P2", rank_name(rank) + " went on without " + rank_name(r));
    }
  }
  own.passed[c] = thread.meeting;
  thread.meeting = 0;
}

bool Ranks::collective(int rank, int channel, Form form, int variant) {
  const auto c = static_cast<std::size_t>(channel);
  Member& member = members_[static_cast<std::size_t>(rank)];
  RankMemory& own = memory_.ranks[static_cast<std::size_t>(rank)];
  Board& board = *member.boards[c];
  const bool must_throw = memory_.failed || own.closed;
  operation(must_throw);
  // As BoardCommunicator::perform.
  users_[rank * kChannels + channel].store(static_cast<std::uint32_t>(self()) + 1);
  const bool is_sharing = form == Form::sharing;
  const Call call = call_by(rank, channel, board.sequence() + 1, variant, is_sharing);
  if (form == Form::direct) {
    member.operands[c]->write() = board.sequence() + 1;
    own.operand_alive[c] = true;
  }
  bool well = false;
  try {
    operation(must_throw);
    const bool fills = form == Form::filled || (form == Form::few && rank == call.root);
    if (fills) elements(board, rank).write() = call.sequence;
    if (is_sharing) member.window[c]->write() = call.sequence;
    if (form == Form::chunks || form == Form::shares) {
      member.staging->next();
      fill_area(rank, call.sequence, 0);
    }
    const bool few_meet =
        form == Form::few && own.in_stretch[c] + 1 < static_cast<std::uint32_t>(kStretch);
    const Mask awaited = few_meet ? 1U << call.root : everyone();
    meeting(rank, channel, awaited,
            [&] { form == Form::few ? board.begin_from_root(call) : board.begin(call); });
    own.in_stretch[c] = few_meet ? own.in_stretch[c] + 1 : 0;
    for (int r = 0; r < program_.ranks; ++r) {
      if ((awaited >> r & 1) == 0) continue;
      const Call& theirs = board.call_of(r);
      check_call(theirs, r, channel, "call_of");
      if (theirs.sequence != board.sequence()) {
        violate("P4", "call_of gives the call before");
      }
    }
    operation(must_throw);
    if (form == Form::few) {
      if (rank != call.root) expect(elements(board, call.root), call.sequence);
    } else {
      move_bytes(rank, channel, form, board.sequence(), must_throw);
    }
    operation(must_throw);
    board.end();
    operation(must_throw);
    well = true;
  } catch (const CommError& error) {
    check_error(error.what(), rank);
    operation(must_throw);
    if (board.in_call()) board.leave(error.what());
  } catch (const Interrupted&) {
    own.aborts = true;
    operation(must_throw);
    board.leave("interrupted");
  }
  if (form == Form::direct) free_operand(rank, channel);
  if (well && must_throw) violate("P2", rank_name(rank) + "'s call succeeds after a failure");
  if (!well) {
    if (board.in_call()) memory_.failed = true;
    own.threw = true;
    if (owes_wakes(self())) violate("P7", rank_name(rank) + " fails, and wakes nobody");
  }
  memory_.threads[static_cast<std::size_t>(self())].meeting = 0;
  operation(well);
  return well;
}

void Ranks::move_bytes(int rank, int channel, Form form, std::uint64_t sequence,
                       std::uint64_t locals) {
  const auto c = static_cast<std::size_t>(channel);
  const Member& own = members_[static_cast<std::size_t>(rank)];
  Board& board = *own.boards[c];
  switch (form) {
    case Form::barrier:
    case Form::few:
      return;
    case Form::staged:
      elements(board, rank).write() = sequence;
      meeting(rank, channel, everyone(), [&] { board.meet(); });
      [[fallthrough]];
    case Form::filled:
      for (int r = 0; r < program_.ranks; ++r) {
        if (r == rank) continue;
        expect(elements(board, r), sequence);
      }
      return;
    case Form::window:
      own.window[c]->write() = sequence;
      meeting(rank, channel, everyone(), [&] { board.meet(); });
      for (int r = 0; r < program_.ranks; ++r) {
        expect(*members_[static_cast<std::size_t>(r)].window[c], sequence);
      }
      return;
    case Form::sharing:
      board.require_one_place();
      for (int r = 0; r < program_.ranks; ++r) {
        expect(*members_[static_cast<std::size_t>(r)].window[c], sequence);
      }
      return;
    case Form::chunks:
    case Form::shares:
      return move_chunks(rank, form, sequence, locals);
    case Form::direct:
      board.start_reading();
      for (int i = 1; i < program_.ranks; ++i) {
        const Call& theirs = board.call_of((rank + i) % program_.ranks);
        read_operand(rank, channel, static_cast<int>(theirs.send.offset), sequence);
      }
      meeting(rank, channel, everyone(), [&] { board.meet(); });
      return;
  }
}

Ranks::Value& Ranks::share(int rank, int of, int share) const {
  const Staging& staging = *members_[static_cast<std::size_t>(rank)].staging;
  const auto& areas = members_[static_cast<std::size_t>(of)].areas;
  return *areas[static_cast<std::size_t>(staging.half())][static_cast<std::size_t>(share)];
}

void Ranks::fill_area(int rank, std::uint64_t sequence, std::int64_t chunk) {
  for (int r = 0; r < program_.ranks; ++r) {
    if (r != rank) share(rank, rank, r).write() = chunk_value(sequence, chunk);
  }
}

// As a reduce-scatter and, for `shares`, an all-reduce.
void Ranks::move_chunks(int rank, Form form, std::uint64_t sequence, std::uint64_t locals) {
  Staging& staging = *members_[static_cast<std::size_t>(rank)].staging;
  const auto fill = [&](std::int64_t chunk) {
    fill_area(rank, sequence, chunk);
    begin_meeting(rank, kReduce, everyone());
  };
  const auto use = [&](std::int64_t chunk) {
    if (chunk > 0) end_meeting(rank, kReduce);
    operation(locals);
    const auto read = [&] {
      for (int r = 0; r < program_.ranks; ++r) {
        if (r != rank) expect(share(rank, r, rank), chunk_value(sequence, chunk));
      }
    };
    if (form == Form::chunks) return read();
    const auto reduce = [&] {
      read();
      share(rank, rank, rank).write() = reduced_value(sequence, chunk);
      begin_meeting(rank, kReduce, everyone());
    };
    const auto copy = [&] {
      end_meeting(rank, kReduce);
      for (int r = 0; r < program_.ranks; ++r) {
        if (r != rank) expect(share(rank, r, r), reduced_value(sequence, chunk));
      }
      operation(locals);
    };
    staging.share(reduce, copy);
  };
  staging.run(program_.chunks, true, fill, use);
}

// A copy takes time: the operand must be there all the while.
void Ranks::read_operand(int rank, int channel, int of, std::uint64_t sequence) {
  const auto c = static_cast<std::size_t>(channel);
  RankMemory& owner = memory_.ranks[static_cast<std::size_t>(of)];
  const auto check = [&] {
    if (!owner.operand_alive[c]) {
      violate("P5", rank_name(rank) + " reads what " + rank_name(of) + " has let go of");
    }
  };
  check();
  owner.operand_read_by[c] |= 1U << self();
  step("copies another rank's operand");
  check();
  expect(*members_[static_cast<std::size_t>(of)].operands[c], sequence);
  owner.operand_read_by[c] &= ~(1U << self());
}

// A stage takes turns as the room for few elements does, and so that stands for both.
Ranks::Value& Ranks::elements(const shardcomm::Board& board, int rank) {
  return *reinterpret_cast<Value*>(board.elements(rank));
}

void Ranks::expect(const Value& value, std::uint64_t sequence) const {
  if (value.read() != sequence) violate("P6", "a rank reads what another has not written yet");
}

void Ranks::free_operand(int rank, int channel) {
  const auto c = static_cast<std::size_t>(channel);
  RankMemory& own = memory_.ranks[static_cast<std::size_t>(rank)];
  if (own.operand_read_by[c] != 0) {
    violate("P5", rank_name(rank) + " lets go of what another reads");
  }
  members_[static_cast<std::size_t>(rank)].operands[c]->write();
  own.operand_alive[c] = false;
}

void Ranks::close(int rank) {
  RankMemory& own = memory_.ranks[static_cast<std::size_t>(rank)];
  own.closes = true;
  own.passed_before_close = own.passed;
  operation(0);
  members_[static_cast<std::size_t>(rank)].group->close();
  own.closed = true;
  if (owes_wakes(self())) violate("P7", rank_name(rank) + " closes, and wakes nobody");
  operation(0);
}

void Ranks::abort(int rank) {
  memory_.ranks[static_cast<std::size_t>(rank)].aborts = true;
  operation(0);
  members_[static_cast<std::size_t>(rank)].group->abort("by hand");
  memory_.failed = true;
  if (owes_wakes(self())) violate("P7", rank_name(rank) + " aborts, and wakes nobody");
  operation(0);
}

void Ranks::interrupt(int rank) {
  operation(0);
  interrupts_[rank].store(1);
  operation(0);
}

void Ranks::post(int calls) {
  for (int i = 1; i <= calls; ++i) {
    operation(0);
    posted_->post(make_call(0, kGather, static_cast<std::uint64_t>(i), i));
  }
}

void Ranks::read_posted(int times) {
  for (int i = 0; i < times; ++i) {
    operation(0);
    Call call;
    if (posted_->read(call)) check_call(call, 0, kGather, "PostedCall::read");
  }
}

void Ranks::look_at(int rank, int of) {
  operation(0);
  const auto last = members_[static_cast<std::size_t>(rank)].group->last_call(of, kGather);
  if (last) check_call(last->call, of, kGather, "last_call");
  operation(0);
}

// As Mailbox::sleep: it arms the bell, looks once more, and sleeps.
void Ranks::sleep_until(Doorbell& bell, const std::function<bool()>& is_done) {
  while (!is_done()) {
    const std::uint32_t rung = bell.rung.load();
    bell.armed.store(1);
    if (is_done()) break;
    sleep_while(bell.rung, rung, shardcomm::kWaitSlice);
  }
  bell.armed.store(0);
}

void Ranks::write_mail(int frames) {
  for (int i = 0; i < frames; ++i) {
    Frame frame;
    frame.tag = i;
    operation(0);
    sleep_until(bells_[0], [&] { return writer_->write(frame, nullptr); });
  }
}

void Ranks::read_mail(int frames) {
  for (int i = 0; i < frames; ++i) {
    operation(0);
    sleep_until(bells_[1], [&] {
      reader_->look();
      return reader_->front() != nullptr;
    });
    if (reader_->front()->tag != i) violate("P4", "another message than the next one");
    reader_->take(nullptr);
  }
}

Ranks::Call Ranks::call_by(int rank, int channel, std::uint64_t sequence, int variant,
                           bool is_sharing) const {
  if (!is_sharing) return make_call(rank, channel, sequence, variant);
  const int window = program_.windows_differ ? rank : 0;
  return make_sharing(static_cast<std::uint64_t>(window), sequence, variant);
}

}  // namespace model

// In place of stream/wait_check.cpp, which keeps one check for each thread: all fibers run on one.
void shardcomm::check_wait() { model::running_ranks->check_interrupt(); }
