#include "programs.h"

namespace model {
namespace {

constexpr Mask kOnGather = 1U << kGather;
constexpr Mask kOnReduce = 1U << kReduce;
constexpr Mask kOnBoth = kOnGather | kOnReduce;
constexpr Mask everyone(int ranks) { return (1U << ranks) - 1; }

// Every rank has one thread, which does `body`.
template <class Body>
std::function<void(Ranks&)> each(Body body) {
  return [body](Ranks& ranks) {
    for (int r = 0; r < ranks.size(); ++r) {
      ranks.thread(r, kOnBoth, [&ranks, body, r] { body(ranks, r); });
    }
  };
}

std::function<void(Ranks&)> collectives(int count, Form form) {
  return each([count, form](Ranks& ranks, int rank) {
    for (int i = 0; i < count; ++i) ranks.collective(rank, kGather, form);
  });
}

Program meeting(int ranks, Form form, int count) {
  Program program;
  program.name = "meeting";
  program.ranks = ranks;
  program.spawn_threads = collectives(count, form);
  program.without_timeouts = true;
  program.world.wakes_needlessly = ranks == 2;
  return program;
}

}  // namespace

std::vector<Program> programs() {
  std::vector<Program> all;
  const auto add = [&](Program program, const char* name, bool is_small) {
    program.name = std::string(name) + "/" + std::to_string(program.ranks);
    program.is_small = is_small;
    all.push_back(std::move(program));
  };

  {  // Nothing goes wrong.
    add(meeting(2, Form::barrier, 2), "barriers", true);
    add(meeting(2, Form::barrier, 4), "more barriers", false);
    add(meeting(2, Form::staged, 1), "staged", true);
    add(meeting(2, Form::staged, 2), "staged twice", false);
    add(meeting(2, Form::filled, 2), "filled", true);
    add(meeting(2, Form::filled, 3), "filled thrice", false);
    add(meeting(2, Form::window, 2), "windows", false);
    Program program = meeting(2, Form::window, 1);
    program.world.weak = true;
    add(program, "weak", true);
    program.spawn_threads = collectives(2, Form::staged);
    add(program, "weak and staged", false);
    program.spawn_threads = collectives(1, Form::staged);
    program.world.spins = true;
    add(program, "spinning", true);
    program = meeting(3, Form::staged, 1);
    program.world.spins = true;
    add(program, "spinning", false);
    add(meeting(3, Form::barrier, 1), "barriers", false);
  }
  {  // The root goes on at once, and the others when it has come.
    add(meeting(2, Form::few, 3), "few", true);
    add(meeting(3, Form::few, 1), "few", false);
    Program program = meeting(2, Form::few, 2);
    program.world.weak = true;
    add(program, "weak and few", false);
    program = meeting(2, Form::few, 1);
    program.spawn_threads = each([](Ranks& ranks, int r) {  // the last takes the place of the first
      for (const Form form : {Form::few, Form::few, Form::barrier, Form::few}) {
        ranks.collective(r, kGather, form);
      }
    });
    add(program, "few again", false);
    program.spawn_threads = each([](Ranks& ranks, int r) {
      ranks.collective(r, kGather, Form::few);
      ranks.collective(r, kGather, Form::filled);
      ranks.collective(r, kGather, Form::few);
    });
    add(program, "few between", false);
    program.spawn_threads = each([](Ranks& ranks, int r) {
      ranks.collective(r, kGather, Form::few);
      ranks.close(r);
    });
    add(program, "few, closed in peace", true);
    // The root gathers and then reduces, and waits in the second alone.
    program.spawn_threads = each([](Ranks& ranks, int r) {
      if (r == 0) ranks.collective(r, kGather, Form::few);
      ranks.collective(r, kReduce, Form::barrier);
      if (r == 1) ranks.collective(r, kGather, Form::few);
    });
    add(program, "few crosswise", true);
    program.spawn_threads = each([](Ranks& ranks, int r) {  // the same, but rank 1 is the root
      ranks.collective(r, r == 0 ? kGather : kReduce, r == 0 ? Form::few : Form::barrier,
                       r == 0 ? 1 : 0) &&
          ranks.collective(r, r == 0 ? kReduce : kGather, r == 0 ? Form::barrier : Form::few,
                           r == 0 ? 0 : 1);
    });
    program.troubles = may(Trouble::deadlock);
    program.all_throw = true;
    program.without_timeouts = false;
    add(program, "few and deadlock", true);
  }
  {  // Of each chunk, a rank reduces its share for all.
    const auto reduces = [](int calls, Form form = Form::shares) {
      return each([calls, form](Ranks& ranks, int r) {
        for (int i = 0; i < calls; ++i) ranks.collective(r, kReduce, form);
      });
    };
    Program program = meeting(2, Form::chunks, 1);
    program.spawn_threads = reduces(1, Form::chunks);
    program.chunks = 2;
    add(program, "chunks", true);
    program.chunks = 3;
    add(program, "more chunks", false);
    program.spawn_threads = reduces(1);
    program.chunks = 1;
    add(program, "shares", true);
    program.chunks = 2;
    add(program, "shares of two chunks", false);
    program.chunks = 1;
    program.spawn_threads = reduces(2);
    add(program, "shares twice", false);
    program.world.weak = true;
    program.spawn_threads = reduces(1);
    add(program, "weak and shares", false);
    program.world.weak = false;
    program.world.may_die = everyone(2);
    program.troubles = may(Trouble::died);
    program.without_timeouts = false;
    add(program, "shares and died", true);
    program = meeting(3, Form::shares, 1);
    program.chunks = 1;
    program.spawn_threads = reduces(1);
    add(program, "shares", false);
  }
  {  // All write their shares of a window; who has read it comes to the next gather.
    Program program = meeting(2, Form::sharing, 1);
    program.spawn_threads = each([](Ranks& ranks, int r) {
      for (const Form form : {Form::sharing, Form::barrier, Form::sharing}) {
        ranks.collective(r, kGather, form);
      }
    });
    add(program, "sharing", true);
    program.spawn_threads = each([](Ranks& ranks, int r) {
      ranks.collective(r, kGather, Form::sharing);
      ranks.collective(r, kGather, Form::barrier);
    });
    program.windows_differ = true;
    program.all_throw = true;
    program.troubles = may(Trouble::mismatch);
    add(program, "sharing apart", false);
    program.windows_differ = false;
    program.calls_differ = true;
    program.spawn_threads = each([](Ranks& ranks, int r) {  // of more bytes
      ranks.collective(r, kGather, Form::sharing, r);
      ranks.collective(r, kGather, Form::barrier);
    });
    add(program, "sharing more", false);
  }
  {  // Gathers on one thread of each rank, reduces on another.
    Program program = meeting(2, Form::barrier, 1);
    program.spawn_threads = [](Ranks& ranks) {
      for (int r = 0; r < ranks.size(); ++r) {
        ranks.thread(r, kOnGather, [&ranks, r] { ranks.collective(r, kGather, Form::barrier); });
        ranks.thread(r, kOnReduce, [&ranks, r] { ranks.collective(r, kReduce, Form::barrier); });
      }
    };
    add(program, "two channels", false);
  }
  {  // A call is posted while another thread reads it, word by word.
    Program program;
    program.ranks = 2;
    program.word_by_word = true;
    program.world.weak = true;
    program.without_timeouts = true;
    program.spawn_threads = [](Ranks& ranks) {
      ranks.thread(0, kOnBoth, [&ranks] { ranks.post(3); });
      ranks.thread(1, kOnBoth, [&ranks] { ranks.read_posted(2); });
    };
    add(program, "posted call", true);
  }
  {  // Messages: who waits for one, and who waits for room, is woken.
    Program program;
    program.ranks = 2;
    program.world.weak = true;
    program.world.wakes_needlessly = false;  // else a writer says again and again that it starves
    program.without_timeouts = true;
    program.spawn_threads = [](Ranks& ranks) {
      ranks.thread(0, kOnBoth, [&ranks] { ranks.write_mail(3); });
      ranks.thread(1, kOnBoth, [&ranks] { ranks.read_mail(3); });
    };
    add(program, "messages", true);
  }
  {  // Somebody asks what a rank is in, while it goes on.
    Program program = meeting(2, Form::barrier, 2);
    program.spawn_threads = [](Ranks& ranks) {
      collectives(2, Form::barrier)(ranks);
      ranks.thread(1, 0, [&ranks] { ranks.look_at(1, 0); });
    };
    add(program, "asked", false);
  }
  {  // Calls that differ.
    Program program = meeting(2, Form::barrier, 1);
    program.spawn_threads = each([](Ranks& all, int r) {
      all.collective(r, kGather, Form::barrier, r == 0 ? 1 : 0);
      all.collective(r, kGather, Form::barrier);
    });
    program.calls_differ = true;
    program.all_throw = true;
    program.troubles = may(Trouble::mismatch);
    program.without_timeouts = true;
    add(program, "mismatch", false);
    // A root may have gone on, and be asleep in its next call.
    program.without_timeouts = false;
    program.spawn_threads = each([](Ranks& all, int r) {
      all.collective(r, kGather, r == 0 ? Form::few : Form::barrier, r);
      all.collective(r, kGather, Form::barrier);
    });
    add(program, "few and other", false);
    program.spawn_threads = each([](Ranks& all, int r) {
      all.collective(r, kGather, Form::few, r);
      all.collective(r, kGather, Form::barrier);
    });
    add(program, "two roots", true);
  }
  for (const int ranks : {2, 3}) {  // A rank stops for ever, anywhere; or is only slow.
    Program program = meeting(ranks, Form::barrier, 1);
    program.world.may_stop = ranks == 2 ? everyone(2) : 1U << 1;
    program.world.time = ranks == 2 ? Time::any : Time::when_idle;
    program.troubles = may(Trouble::late);
    program.without_timeouts = false;
    add(program, "stopped", ranks == 2);
    if (ranks == 2) {
      program.spawn_threads = collectives(1, Form::window);
      add(program, "stopped between", false);
      program.spawn_threads = collectives(2, Form::few);
      add(program, "few and stopped", false);
    }
  }
  for (const int ranks : {2, 3}) {  // A rank dies, anywhere. No deadline is needed to find it.
    Program program = meeting(ranks, ranks == 2 ? Form::window : Form::barrier, 1);
    program.world.may_die = ranks == 2 ? everyone(2) : 1U << 1;
    program.troubles = may(Trouble::died);
    program.without_timeouts = false;
    add(program, "died", ranks == 2);
    program.spawn_threads = collectives(ranks == 2 ? 2 : 1, Form::few);
    add(program, "few and died", ranks == 2);
  }
  {  // Another thread of rank 0 aborts.
    Program program = meeting(2, Form::barrier, 1);
    program.spawn_threads = [](Ranks& all) {
      collectives(1, Form::barrier)(all);
      all.thread(0, 0, [&all] { all.abort(0); });
    };
    program.troubles = may(Trouble::aborted);
    program.without_timeouts = false;
    add(program, "aborted", true);
    program.spawn_threads = [](Ranks& all) {
      collectives(2, Form::barrier)(all);
      all.thread(0, 0, [&all] { all.abort(0); });
    };
    add(program, "aborted, called again", false);
  }
  {  // Two failures at once: rank 0 aborts, what rank 1 does is interrupted.
    Program program = meeting(2, Form::barrier, 1);
    program.spawn_threads = [](Ranks& ranks) {
      collectives(2, Form::barrier)(ranks);
      ranks.thread(0, 0, [&ranks] { ranks.abort(0); });
      ranks.thread(1, 0, [&ranks] { ranks.interrupt(1); });
    };
    program.troubles = may(Trouble::aborted);
    program.without_timeouts = false;
    add(program, "two failures", false);
  }
  {  // Two threads of a rank abort at once: there is one reason, and it is whole.
    Program program = meeting(2, Form::barrier, 1);
    program.spawn_threads = [](Ranks& ranks) {
      ranks.thread(0, 0, [&ranks] { ranks.abort(0); });
      ranks.thread(0, 0, [&ranks] { ranks.abort(0); });
      ranks.thread(1, kOnBoth, [&ranks] { ranks.collective(1, kGather, Form::barrier); });
    };
    program.troubles = may(Trouble::aborted);
    program.without_timeouts = false;
    add(program, "aborted twice", true);
  }
  for (const int ranks : {2, 3}) {  // Each closes after its last call: nobody is to blame.
    Program program = meeting(ranks, Form::barrier, 1);
    program.spawn_threads = each([](Ranks& all, int r) {
      all.collective(r, kGather, Form::barrier);
      all.close(r);
    });
    program.without_timeouts = true;
    add(program, "closed in peace", ranks == 2);
  }
  {  // Rank 0 closes, and the others call once more.
    Program program = meeting(2, Form::barrier, 1);
    program.spawn_threads = each([](Ranks& ranks, int r) {
      ranks.collective(r, kGather, Form::barrier);
      if (r == 0) ranks.close(0);
      ranks.collective(r, kGather, Form::barrier);
    });
    program.troubles = may(Trouble::closed);
    program.all_throw = true;
    program.without_timeouts = false;
    add(program, "closed", true);
    // The same, by another thread while rank 0 is in a call.
    program.spawn_threads = [](Ranks& ranks) {
      collectives(1, Form::barrier)(ranks);
      ranks.thread(0, 0, [&ranks] { ranks.close(0); });
    };
    program.all_throw = false;
    add(program, "closed meanwhile", true);
    program.spawn_threads = [](Ranks& ranks) {  // and rank 1 never comes
      ranks.thread(0, kOnBoth, [&ranks] { ranks.collective(0, kGather, Form::barrier); });
      ranks.thread(0, 0, [&ranks] { ranks.close(0); });
    };
    add(program, "closed alone", true);
  }
  for (const int ranks : {2, 3}) {  // Rank 0 gathers and then reduces, the others the reverse.
    Program program = meeting(ranks, Form::barrier, 1);
    program.spawn_threads = each([](Ranks& all, int r) {
      all.collective(r, r == 0 ? kGather : kReduce, Form::barrier) &&
          all.collective(r, r == 0 ? kReduce : kGather, Form::barrier);
    });
    program.troubles = may(Trouble::deadlock);
    program.all_throw = true;
    program.without_timeouts = false;
    add(program, "crosswise", ranks == 2);
  }
  {  // Rank 0 gathers and reduces at once, rank 1 one after the other: nobody is stuck.
    Program program = meeting(2, Form::barrier, 1);
    program.spawn_threads = [](Ranks& ranks) {
      ranks.thread(0, kOnGather, [&ranks] { ranks.collective(0, kGather, Form::barrier); });
      ranks.thread(0, kOnReduce, [&ranks] { ranks.collective(0, kReduce, Form::barrier); });
      ranks.thread(1, kOnBoth, [&ranks] {
        ranks.collective(1, kReduce, Form::barrier);
        ranks.collective(1, kGather, Form::barrier);
      });
    };
    program.without_timeouts = true;
    add(program, "not crosswise", false);
  }
  {  // Rank 2 never comes. Rank 1 may come in time, and is not to blame then.
    Program program = meeting(3, Form::barrier, 1);
    program.spawn_threads = [](Ranks& ranks) {
      for (const int r : {0, 1}) {
        ranks.thread(r, kOnBoth, [&ranks, r] { ranks.collective(r, kGather, Form::barrier); });
      }
    };
    program.world.time = Time::any;
    program.world.wakes_needlessly = true;
    program.troubles = may(Trouble::late);
    program.without_timeouts = false;
    add(program, "one is late", false);
  }
  {  // Rank 2 never comes. Rank 1 waits for it in a reduce, and so is late in rank 0's gather.
    Program program = meeting(3, Form::barrier, 1);
    program.spawn_threads = [](Ranks& ranks) {
      ranks.thread(0, kOnGather, [&ranks] { ranks.collective(0, kGather, Form::barrier); });
      ranks.thread(1, kOnReduce, [&ranks] { ranks.collective(1, kReduce, Form::barrier); });
    };
    program.world.time = Time::any;
    program.world.wakes_needlessly = true;
    program.troubles = may(Trouble::late);
    program.without_timeouts = false;
    add(program, "late by another", false);
  }
  {  // Others read a rank's operand while its call is interrupted.
    Program program = meeting(2, Form::direct, 1);
    program.reads_addresses = true;
    program.spawn_threads = [](Ranks& all) {
      collectives(1, Form::direct)(all);
      all.thread(0, 0, [&all] { all.interrupt(0); });
    };
    program.troubles = may(Trouble::aborted);
    program.without_timeouts = false;
    program.world.weak = true;
    add(program, "direct", true);
    program.world.weak = false;
    program.spawn_threads = [](Ranks& all) {
      collectives(1, Form::direct)(all);
      all.thread(0, 0, [&all] { all.abort(0); });
    };
    add(program, "direct, aborted", false);
  }
  return all;
}

}  // namespace model
