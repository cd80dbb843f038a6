//! One walk through a program: drops buffers where there is no room, and makes again what is
//! missing.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

use burn_std::DType;
use firebox_trace::{Bytes, Call, OpIndex, Step, TensorIndex};

use crate::cost::Demand;
use crate::lives::{Lives, NEVER};
use crate::recipe::{Anchor, Edit, Made, Recipe};

/// A walk that repeats more than this share of all calls' costs is given up: near the least memory,
/// tensors are made again over and over.
const MOST_REPEATED: f64 = 1.0;

/// A choice.
#[derive(Clone, Debug, PartialEq)]
pub struct Selected {
    /// What to do.
    pub recipe: Recipe,
    /// The time of the repeated calls, in the unit of the demand.
    pub cost: f64,
    /// The most bytes that tensors and workspace take at once, without what an allocator adds.
    pub peak: Bytes,
}

/// How losses are weighed: the exponents of the cost of a buffer and of the time to its next use,
/// and the share of what is missing for it in its cost.
pub(crate) type Weights = (f64, f64, f64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Unborn,
    Alive,
    Dropped,
    Packed,
    Ended,
}

/// What a walk has to do for a tensor that is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Need {
    /// Make it, and first what it is made of.
    Tensor,
    /// Repeat its call: what it is made of is there.
    Call,
}

pub(crate) struct Walk<'a> {
    lives: &'a Lives<'a>,
    limit: u64,
    demand: &'a Demand,
    costs: &'a [f64],
    workspace: &'a [Bytes],
    clock: &'a [f64],
    weights: Weights,
    /// Buffers that must stay.
    keeps: &'a [bool],
    states: Vec<State>,
    /// How many tensors of each buffer are alive.
    alive: Vec<u32>,
    /// The buffers that may go, by what is known to be lost with them, as bits.
    losses: BinaryHeap<Reverse<(u64, usize)>>,
    /// Whether each buffer is among them.
    queued: Vec<bool>,
    /// The buffers to drop after a step, the latest step first.
    seed: Vec<(usize, usize)>,
    /// Whether each buffer is there only because it was made again.
    repeated: Vec<bool>,
    /// How often each buffer must stay.
    pins: Vec<u32>,
    live: u64,
    peak: u64,
    edits: Vec<Edit>,
    /// What the repeats cost so far, and what they may cost.
    spent: f64,
    most: f64,
    /// For each step the number of the search that has seen it, and that of the latest search.
    seen: RefCell<(Vec<u32>, u32)>,
}

impl<'a> Walk<'a> {
    pub(crate) fn new(
        lives: &'a Lives<'a>,
        limit: u64,
        demand: &'a Demand,
        clock: &'a [f64],
        weights: Weights,
        keeps: &'a [bool],
    ) -> Self {
        let count = lives.trace.tensors.len();
        let mut walk = Self {
            lives,
            limit,
            demand,
            costs: &demand.time,
            workspace: &demand.workspace,
            clock,
            weights,
            keeps,
            states: vec![State::Unborn; count],
            alive: vec![0; count],
            losses: BinaryHeap::new(),
            queued: vec![false; count],
            seed: Vec::new(),
            repeated: vec![false; count],
            pins: vec![0; count],
            live: 0,
            peak: 0,
            edits: Vec::new(),
            spent: 0.0,
            most: MOST_REPEATED * clock.last().copied().unwrap_or_default(),
            seen: RefCell::new((vec![0; lives.trace.steps.len()], 0)),
        };
        lives.trace.existing().for_each(|tensor| walk.begin(tensor));
        walk
    }

    /// Drops these buffers where their longest time without use begins.
    pub(crate) fn drop_after_gaps(&mut self, roots: &[usize], gaps: &[usize]) {
        self.seed = roots.iter().map(|root| (gaps[*root], *root)).collect();
        self.seed.retain(|(_, root)| !self.keeps[*root]);
        self.seed.sort_unstable_by(|one, other| other.cmp(one));
    }

    fn drop_seeds(&mut self, at: usize) {
        while let Some((_, root)) = self.seed.pop_if(|(after, _)| *after <= at) {
            if self.alive[root] > 0 && self.loss(root, at + 1).is_some() {
                self.give_up(at + 1, root);
            }
        }
    }

    /// Walks through all steps. None if that repeats too much.
    pub(crate) fn run(mut self) -> Option<Selected> {
        for at in 0..self.costs.len() {
            self.step(at);
            if self.spent > self.most {
                return None;
            }
        }
        let recipe = Recipe { edits: self.edits, drains: self.demand.drains };
        Some(Selected { recipe, cost: self.spent, peak: Bytes::new(self.peak) })
    }

    fn begin(&mut self, tensor: TensorIndex) {
        let root = self.lives.root(tensor);
        self.states[tensor.0 as usize] = State::Alive;
        self.alive[root] += 1;
        if self.alive[root] == 1 {
            let buffer = &self.lives.buffers[root];
            self.live += buffer.bytes;
            if buffer.may_go() && !self.keeps[root] {
                self.queue(0, root);
            }
        }
        self.peak = self.peak.max(self.live);
    }

    fn finish(&mut self, tensor: TensorIndex, state: State) {
        let root = self.lives.root(tensor);
        match std::mem::replace(&mut self.states[tensor.0 as usize], state) {
            State::Alive => {}
            State::Packed => {
                self.live -= self.lives.buffers[root].packed.unwrap_or_default();
                return;
            }
            State::Unborn | State::Dropped | State::Ended => return,
        }
        self.alive[root] -= 1;
        if self.alive[root] == 0 {
            self.live -= self.lives.buffers[root].bytes;
            self.repeated[root] = false;
        }
    }

    /// Gives up a buffer before a step: packs a mask, and drops anything else.
    fn give_up(&mut self, before: usize, root: usize) {
        match self.lives.buffers[root].packed.zip(self.demand.bools) {
            Some((packed, dtype)) => self.pack(before, root, (packed, dtype)),
            None => self.drop_buffer(before, root),
        }
    }

    fn pack(&mut self, before: usize, root: usize, (packed, dtype): (u64, DType)) {
        self.edits.push(Edit::Pack { before: self.anchor(before), mask: self.made(root), dtype });
        self.spent += self.demand.conversion(self.lives.buffers[root].bytes, packed);
        self.live += packed;
        self.peak = self.peak.max(self.live);
        self.finish(TensorIndex(root as u32), State::Packed);
    }

    fn unpack(&mut self, before: usize, root: usize) {
        let bytes = self.lives.buffers[root].bytes;
        let packed = self.lives.buffers[root].packed.unwrap_or_default();
        self.make_room(before, bytes);
        self.edits.push(Edit::Unpack { before: self.anchor(before), mask: self.made(root) });
        self.spent += self.demand.conversion(bytes, packed);
        self.begin(TensorIndex(root as u32));
        self.live -= packed;
        self.repeated[root] = true;
    }

    fn drop_buffer(&mut self, before: usize, root: usize) {
        let before = self.anchor(before);
        self.edits.push(Edit::Drop { before, buffer: self.made(root) });
        for at in 0..self.lives.buffers[root].tensors.len() {
            let tensor = self.lives.buffers[root].tensors[at];
            if self.states[tensor.0 as usize] == State::Alive {
                self.finish(tensor, State::Dropped);
            }
        }
    }

    fn anchor(&self, step: usize) -> Anchor {
        self.lives.anchors.from(OpIndex(step as u32))
    }

    /// What makes the owner of a buffer.
    fn made(&self, root: usize) -> Made {
        let at = self.lives.made[root];
        let result = match &self.lives.trace.steps[at] {
            Step::Call(call) => call.outputs.iter().position(|output| output.0 as usize == root),
            _ => None,
        };
        Made { by: self.anchor(at), result: result.expect("what is dropped was made") as u32 }
    }

    fn pin(&mut self, call: &Call, by: i32) {
        let inputs = call.inputs.iter().map(|input| input.tensor);
        for tensor in inputs.chain(call.outputs.iter().copied()) {
            let pins = &mut self.pins[self.lives.root(tensor)];
            *pins = pins.saturating_add_signed(by);
        }
    }

    fn step(&mut self, at: usize) {
        let lives = self.lives;
        match &lives.trace.steps[at] {
            Step::Call(call) => {
                self.pin(call, 1);
                call.inputs.iter().for_each(|input| self.need(input.tensor, at));
                self.make_room(at, self.bytes_of(call) + self.workspace[at].get());
                call.outputs.iter().for_each(|output| self.begin(*output));
                self.peak = self.peak.max(self.live + self.workspace[at].get());
                self.pin(call, -1);
                for input in call.inputs.iter().filter(|input| input.last) {
                    self.finish(input.tensor, State::Ended);
                }
                call.inputs.iter().for_each(|input| self.drop_repeat(input.tensor, at + 1));
            }
            Step::Upload { output, .. } => {
                let root = lives.root(*output);
                self.make_room(at, lives.buffers[root].bytes);
                self.begin(*output);
            }
            Step::Read(read) => {
                self.need(read.tensor, at);
                if read.last {
                    self.finish(read.tensor, State::Ended);
                }
                self.drop_repeat(read.tensor, at + 1);
            }
            Step::Free(tensor) => self.finish(*tensor, State::Ended),
            Step::Mark(_) => {}
        }
        if at + 1 < self.costs.len() {
            self.drop_seeds(at);
        }
    }

    /// The bytes of the buffers that a call makes.
    fn bytes_of(&self, call: &Call) -> u64 {
        let made = call.outputs.iter().filter(|tensor| {
            let root = self.lives.root(**tensor);
            root == tensor.0 as usize
        });
        made.map(|tensor| self.lives.buffers[tensor.0 as usize].bytes).sum()
    }

    /// Makes a tensor again before a step, if it is not there. Iterative, because a chain may be
    /// long.
    fn need(&mut self, tensor: TensorIndex, before: usize) {
        let mut todo = vec![(tensor, Need::Tensor)];
        while let Some((tensor, need)) = todo.pop() {
            if need == Need::Call {
                self.redo(tensor, before);
                continue;
            }
            // A walk that has spent too much is given up after this step.
            if self.states[tensor.0 as usize] == State::Alive || self.spent > self.most {
                continue;
            }
            if self.states[tensor.0 as usize] == State::Packed {
                self.unpack(before, self.lives.root(tensor));
                continue;
            }
            let call = self.maker(tensor);
            self.pin(call, 1);
            todo.push((tensor, Need::Call));
            todo.extend(call.inputs.iter().rev().map(|input| (input.tensor, Need::Tensor)));
        }
    }

    /// The call that makes a tensor that was dropped.
    fn maker(&self, tensor: TensorIndex) -> &'a Call {
        match self.lives.trace.steps.get(self.lives.made[tensor.0 as usize]) {
            Some(Step::Call(call)) => call,
            _ => unreachable!("only what a call has made is dropped"),
        }
    }

    /// Repeats the call that makes a tensor, on inputs that are there.
    fn redo(&mut self, tensor: TensorIndex, before: usize) {
        let (lives, call) = (self.lives, self.maker(tensor));
        let at = lives.made[tensor.0 as usize];
        self.make_room(before, self.bytes_of(call) + self.workspace[at].get());
        self.edits.push(Edit::Redo { before: self.anchor(before), call: self.anchor(at) });
        self.spent += self.costs[at];
        // A result that is still there is made a second time for a moment.
        let twice: u64 = call
            .outputs
            .iter()
            .filter(|output| self.states[output.0 as usize] == State::Alive)
            .filter(|output| lives.root(**output) == output.0 as usize)
            .map(|output| lives.buffers[output.0 as usize].bytes)
            .sum();
        self.peak = self.peak.max(self.live + twice + self.workspace[at].get());
        for output in &call.outputs {
            if self.states[output.0 as usize] != State::Alive {
                let root = lives.root(*output);
                self.repeated[root] |= self.alive[root] == 0;
                self.begin(*output);
            }
        }
        self.pin(call, -1);
        for input in call.inputs.iter().filter(|input| input.last) {
            self.finish(input.tensor, State::Dropped);
        }
        self.pins[lives.root(tensor)] += 1;
        let others = call.inputs.iter().map(|input| input.tensor);
        others.chain(call.outputs.iter().copied()).for_each(|of| self.drop_repeat(of, before));
        self.pins[lives.root(tensor)] -= 1;
    }

    /// Drops what was made again and is not used by any later step.
    fn drop_repeat(&mut self, tensor: TensorIndex, before: usize) {
        let root = self.lives.root(tensor);
        let is_done = self.repeated[root] && self.alive[root] > 0 && self.pins[root] == 0;
        let is_last = before < self.costs.len() && self.lives.next_use(root, before) == NEVER;
        if is_done && is_last && self.lives.comes_back(root) {
            self.drop_buffer(before, root);
        }
    }

    /// Drops buffers before a step until `bytes` more fit, or nothing is left to drop.
    ///
    /// What is lost with a buffer mostly grows: its next use comes closer, and what it is made from
    /// goes. So the least known loss is found out anew, and counts if it is still the least.
    fn make_room(&mut self, before: usize, bytes: u64) {
        let mut stay = Vec::new();
        while self.live + bytes > self.limit {
            let Some(Reverse((known, root))) = self.losses.pop() else { break };
            self.queued[root] = false;
            if self.alive[root] == 0 {
                continue;
            }
            match self.loss(root, before).map(f64::to_bits) {
                None => stay.push((known, root)),
                Some(loss) if self.losses.peek().is_some_and(|Reverse((next, _))| loss > *next) => {
                    self.queue(loss, root);
                }
                Some(_) => self.give_up(before, root),
            }
        }
        stay.into_iter().for_each(|(known, root)| self.queue(known, root));
    }

    fn queue(&mut self, loss: u64, root: usize) {
        if !std::mem::replace(&mut self.queued[root], true) {
            self.losses.push(Reverse((loss, root)));
        }
    }

    /// What is lost with a buffer: not negative, so that its bits have its order. None if it must
    /// stay for now.
    fn loss(&self, root: usize, before: usize) -> Option<f64> {
        let lives = self.lives;
        let buffer = &lives.buffers[root];
        let horizon = lives.horizon[before];
        if self.pins[root] > 0 {
            return None;
        }
        let next = lives.next_use(root, before);
        if next != NEVER && next >= horizon {
            return None;
        }
        let (of_cost, of_time, of_missing) = self.weights;
        let weigh = |cost: f64, bytes: u64| {
            let time = self.clock[next] - self.clock[before];
            cost.powf(of_cost) / (bytes as f64 * time.max(f64::MIN_POSITIVE).powf(of_time))
        };
        if let Some(packed) = buffer.packed {
            // For a moment there are both. What may be made of a mask after its own last use needs
            // it, and it cannot be drawn again.
            if next == NEVER || self.live + packed > self.limit {
                return None;
            }
            let cost = 2.0 * self.demand.conversion(buffer.bytes, packed);
            return Some(weigh(cost, buffer.freed()));
        }
        let tensors =
            || buffer.tensors.iter().filter(|t| self.states[t.0 as usize] == State::Alive);
        let until = next.min(horizon);
        if !tensors().all(|tensor| lives.remade_until[tensor.0 as usize] >= until) {
            return None;
        }
        if next == NEVER {
            return Some(0.0);
        }
        let own: f64 = tensors().map(|tensor| self.costs[lives.made[tensor.0 as usize]]).sum();
        let all: f64 = tensors().map(|tensor| self.chain(*tensor)).sum();
        let cost = own + (all - own).max(0.0) * of_missing;
        Some(weigh(cost, buffer.bytes))
    }

    /// What it costs to make a tensor again, with all that is missing for it.
    fn chain(&self, tensor: TensorIndex) -> f64 {
        let mut seen = self.seen.borrow_mut();
        let (stamps, stamp) = &mut *seen;
        *stamp += 1;
        let mut cost = 0.0;
        let mut missing = vec![tensor];
        while let Some(tensor) = missing.pop() {
            let at = self.lives.made[tensor.0 as usize];
            let Some(Step::Call(call)) = self.lives.trace.steps.get(at) else { continue };
            if self.states[tensor.0 as usize] == State::Packed {
                let buffer = &self.lives.buffers[self.lives.root(tensor)];
                cost += self.demand.conversion(buffer.bytes, buffer.packed.unwrap_or_default());
                continue;
            }
            if std::mem::replace(&mut stamps[at], *stamp) == *stamp {
                continue;
            }
            cost += self.costs[at];
            let inputs = call.inputs.iter().map(|input| input.tensor);
            missing.extend(inputs.filter(|input| self.states[input.0 as usize] != State::Alive));
        }
        cost
    }
}

#[cfg(test)]
mod tests;
