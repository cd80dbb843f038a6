//! Unrolls loops of a measured sequence of buffers: a training step is rehearsed with three
//! micro-steps of a size, and runs with many. `packing.rs` places the result.

use crate::pool::Lifetime;

/// A loop is unrolled at most this many times, and then as often more as keeps the number of times
/// the same, modulo [`PERIOD`]: what outlives a part comes to lie where it lay one, two or three
/// parts before.
const MOST_TIMES: u32 = 12;
/// See [`MOST_TIMES`].
const PERIOD: u32 = 6;

/// A part of a sequence that runs more often than it was measured. All numbers are those of
/// requests, as in [`Lifetime`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loop {
    /// The last request before the part that precedes those two. It may make other requests.
    pub first: u32,
    /// The last request before the part that precedes the loop's, which makes the same requests.
    pub from: u32,
    /// The last request of that part.
    pub middle: u32,
    /// The last request of the loop's part.
    pub to: u32,
    /// How many more times the part runs.
    pub times: u32,
}

impl Loop {
    /// The number of requests that unrolling adds.
    fn added(&self) -> u32 {
        self.times() * (self.to - self.middle)
    }

    fn times(&self) -> u32 {
        match self.times {
            few @ ..=MOST_TIMES => few,
            many => MOST_TIMES + (many - MOST_TIMES) % PERIOD,
        }
    }

    /// Whether the part before made the same requests.
    fn repeats(&self, lifetimes: &[Lifetime]) -> bool {
        let part = |from: u32, to: u32| {
            lifetimes[from as usize..to as usize].iter().map(|one| (one.region, one.place.size))
        };
        self.times > 0
            && self.middle - self.from == self.to - self.middle
            && part(self.from, self.middle).eq(part(self.middle, self.to))
    }
}

/// Unrolls `loops`, which are in order and do not overlap, in the lifetimes of all buffers.
/// `units` are numbers of requests outside of loops, and are moved along. A loop whose part does
/// not repeat the one before it is left as it is.
///
/// Buffers of the repetitions live as those of the loop's part did. One that outlives its part ends
/// in the next one if its like in the part before the loop's ended in that, and in the next but one
/// if a buffer of its size did from the part before both. Others stay until the loop has ended.
pub(crate) fn unroll(
    lifetimes: &[Lifetime],
    units: &[u32],
    loops: &[Loop],
) -> (Vec<Lifetime>, Vec<u32>) {
    let (mut all, mut units) = (lifetimes.to_vec(), units.to_vec());
    // Those behind come first: they do not move the others.
    for one in loops.iter().rev().filter(|one| one.repeats(lifetimes)) {
        all = unroll_one(&all, one);
        let behind = units.iter_mut().filter(|unit| **unit >= one.to);
        behind.for_each(|unit| *unit += one.added());
    }
    (all, units)
}

fn unroll_one(all: &[Lifetime], one: &Loop) -> Vec<Lifetime> {
    let (length, times, added) = (one.to - one.middle, one.times(), one.added());
    let moved = |number: u32| if number > one.to { number + added } else { number };
    let part = one.middle as usize..one.to as usize;
    let ends = part_ends(all, one);
    // The end of a buffer that was made `time` repetitions after the loop's part.
    let end_of = |at: usize, time: u32| {
        let own = all[at].end.map(moved);
        match ends[at - part.start] {
            None => own,
            // Behind the loop it ends where its like was seen to, that of the last part or that of
            // the part before it.
            Some(end) if end + time * length > one.to + added => match times - time {
                0 => own,
                _ => all[at - length as usize].end.map(moved),
            },
            Some(end) => Some(end + time * length),
        }
    };
    let mut unrolled: Vec<Lifetime> = Vec::with_capacity(all.len() + added as usize);
    let (before, rest) = all.split_at(part.end);
    unrolled.extend(before.iter().map(|buffer| Lifetime { end: buffer.end.map(moved), ..*buffer }));
    for at in part.clone() {
        unrolled[at].end = end_of(at, 0);
        // Its like in the part before may end in the first repetition.
        let earlier = at - length as usize;
        if let Some(end) = ends[at - part.start].filter(|end| end - length > one.to) {
            unrolled[earlier].end = Some(end - length);
        }
    }
    for time in 1..=times {
        for at in part.clone() {
            let begin = all[at].begin + time * length;
            unrolled.push(Lifetime { begin, end: end_of(at, time), ..all[at] });
        }
    }
    unrolled.extend(rest.iter().map(|buffer| Lifetime {
        begin: buffer.begin + added,
        end: buffer.end.map(moved),
        ..*buffer
    }));
    unrolled
}

/// Where the buffers of the loop's part end if it repeats. `None` for those that stay.
fn part_ends(all: &[Lifetime], one: &Loop) -> Vec<Option<u32>> {
    let length = one.to - one.middle;
    let ends_here =
        |buffer: &Lifetime| buffer.end.filter(|end| *end > one.middle && *end <= one.to);
    let older = all[one.first as usize..one.from as usize].iter();
    let mut older: Vec<&Lifetime> = older.filter(|buffer| ends_here(buffer).is_some()).collect();
    let mut end_of = |at: usize| {
        let (own, earlier) = (&all[at], &all[at - length as usize]);
        if let Some(end) = ends_here(own) {
            return Some(end);
        }
        if let Some(end) = ends_here(earlier) {
            return Some(end + length);
        }
        let like = |old: &&Lifetime| (old.region, old.place.size) == (own.region, own.place.size);
        let old = older.iter().position(like)?;
        ends_here(older.remove(old)).map(|end| end + 2 * length)
    };
    (one.middle as usize..one.to as usize).map(&mut end_of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::{PageId, Place};
    use crate::region::Region;

    /// The buffers of micro-steps: slices of the batch, a large buffer, an output that is freed
    /// when the next micro-step but one begins, and a sum that replaces that of the one before.
    /// The last is followed by three requests of an optimizer step.
    fn micro_steps(count: u32) -> Vec<Lifetime> {
        let buffer = |size, begin, end| {
            let place = Place { page: PageId(0), offset: 0, size };
            Lifetime { region: Region::Step, place, begin, end: Some(end) }
        };
        let last = 4 * count;
        let mut all: Vec<Lifetime> = (0..count)
            .flat_map(|step| {
                let at = 4 * step;
                // The last sum is consumed by the second request of the optimizer step.
                let sum = if step + 1 == count { last + 2 } else { at + 9 };
                // The next outputs end with the iteration.
                let output = if step + 2 > count - 1 { last + 4 } else { at + 9 };
                [
                    buffer(20, at + 1, at + 4),
                    buffer(100, at + 2, at + 3),
                    buffer(10, at + 3, output),
                    buffer(30, at + 4, sum.min(last + 2)),
                ]
            })
            .collect();
        all.extend((1..=3).map(|at| buffer(7, last + at, last + 4)));
        all
    }

    #[test]
    fn a_loop_runs_as_often_as_it_is_told() {
        for count in [3, 4, 5, 9, 15] {
            let one = Loop { first: 0, from: 4, middle: 8, to: 12, times: count - 3 };
            let (all, units) = unroll(&micro_steps(3), &[0, 15], &[one]);
            assert_eq!(all, micro_steps(count), "{count}");
            assert_eq!(units, [0, 4 * count + 3]);
        }
    }

    #[test]
    fn many_times_are_unrolled_as_few_of_the_same_remainder() {
        let one = |times| Loop { first: 0, from: 4, middle: 8, to: 12, times };
        let all = |times| unroll(&micro_steps(3), &[], &[one(times)]).0;
        assert_eq!(all(1000).len(), all(12 + 988 % 6).len());
    }

    #[test]
    fn a_part_unlike_the_one_before_it_stays() {
        let mut buffers = micro_steps(3);
        buffers[5].place.size = 1;
        let one = Loop { first: 0, from: 4, middle: 8, to: 12, times: 5 };
        assert_eq!(unroll(&buffers, &[15], &[one]), (buffers, vec![15]));
    }
}
