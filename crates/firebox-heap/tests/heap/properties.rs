//! Properties that hold for every trace.

use firebox_heap::Heap;
use firebox_trace::{Bytes, Footprint, MemoryModel, Step, TensorIndex, Trace, Use};
use proptest::prelude::*;

use crate::builder::Builder;

/// One line of a random program. Numbers select among the live tensors.
#[derive(Clone, Debug)]
enum Command {
    Upload(usize),
    Exp(usize, bool),
    Add(usize, usize, bool),
    Matmul(usize, bool),
    Transpose(usize, bool),
    Reshape(usize, bool),
    Head(usize, bool),
    Unknown(usize, bool),
    Read(usize, bool),
    Free(usize),
}

fn commands(views: bool) -> impl Strategy<Value = Vec<Command>> {
    let n = 0..64_usize;
    let computing = prop_oneof![
        n.clone().prop_map(Command::Upload),
        (n.clone(), any::<bool>()).prop_map(|(x, last)| Command::Exp(x, last)),
        (n.clone(), n.clone(), any::<bool>()).prop_map(|(x, y, last)| Command::Add(x, y, last)),
        (n.clone(), any::<bool>()).prop_map(|(x, last)| Command::Matmul(x, last)),
        (n.clone(), any::<bool>()).prop_map(|(x, last)| Command::Unknown(x, last)),
        (n.clone(), any::<bool>()).prop_map(|(x, last)| Command::Read(x, last)),
        n.clone().prop_map(Command::Free),
    ];
    let viewing = prop_oneof![
        (n.clone(), any::<bool>()).prop_map(|(x, last)| Command::Transpose(x, last)),
        (n.clone(), any::<bool>()).prop_map(|(x, last)| Command::Reshape(x, last)),
        (n, any::<bool>()).prop_map(|(x, last)| Command::Head(x, last)),
    ];
    let command =
        if views { prop_oneof![3 => computing, 2 => viewing].boxed() } else { computing.boxed() };
    proptest::collection::vec(command, 1..60)
}

/// A program in progress. All tensors are square matrices, or flat or sliced views of them.
struct Program {
    builder: Builder,
    alive: Vec<TensorIndex>,
}

impl Program {
    fn new() -> Self {
        let mut builder = Builder::default();
        let alive = vec![builder.existing(&[8, 8]), builder.existing(&[16, 16])];
        Self { builder, alive }
    }

    fn pick(&self, n: usize, fits: impl Fn(&[usize]) -> bool) -> Option<TensorIndex> {
        let shape = |t: &TensorIndex| self.builder.trace.tensor(*t).shape.to_vec();
        let fitting: Vec<_> = self.alive.iter().filter(|t| fits(&shape(t))).collect();
        (!fitting.is_empty()).then(|| *fitting[n % fitting.len()])
    }

    fn consume(&mut self, tensor: TensorIndex, last: bool) -> Use {
        if last {
            self.alive.retain(|alive| *alive != tensor);
        }
        Use { tensor, last }
    }

    fn one(
        &mut self,
        n: usize,
        last: bool,
        fits: impl Fn(&[usize]) -> bool,
        call: impl FnOnce(&mut Builder, Use) -> TensorIndex,
    ) {
        if let Some(x) = self.pick(n, fits) {
            let x = self.consume(x, last);
            let made = call(&mut self.builder, x);
            self.alive.push(made);
        }
    }

    fn run(&mut self, command: &Command) {
        let square = |shape: &[usize]| shape.len() == 2 && shape[0] == shape[1];
        let any = |_: &[usize]| true;
        match *command {
            Command::Upload(n) => {
                let side = 4 << (n % 3);
                let made = self.builder.upload(&[side, side]);
                self.alive.push(made);
            }
            Command::Exp(n, last) => self.one(n, last, any, Builder::exp),
            Command::Unknown(n, last) => self.one(n, last, any, Builder::unknown),
            Command::Add(n, m, last) => {
                let Some(x) = self.pick(n, any) else { return };
                let shape = self.builder.trace.tensor(x).shape.to_vec();
                let y = self.pick(m, |other| *other == shape[..]).expect("x at least");
                let x_last = last && x != y;
                let (y, x) = (self.consume(y, last), self.consume(x, x_last));
                let made = self.builder.add(x, y);
                self.alive.push(made);
            }
            Command::Matmul(n, last) => self.one(n, last, square, |b, x| {
                let first = Use { last: false, ..x };
                b.matmul(first, x)
            }),
            Command::Transpose(n, last) => self.one(n, last, |s| s.len() == 2, Builder::transpose),
            Command::Reshape(n, last) => self.one(
                n,
                last,
                |s| s.len() == 2,
                |b, x| {
                    let elements = b.trace.tensor(x.tensor).shape.num_elements();
                    b.reshape(x, &[elements])
                },
            ),
            Command::Head(n, last) => self.one(
                n,
                last,
                |s| s[0] > 1,
                |b, x| {
                    let rows = b.trace.tensor(x.tensor).shape[0] / 2;
                    b.head(x, rows)
                },
            ),
            Command::Read(n, last) => {
                if let Some(x) = self.pick(n, any) {
                    let x = self.consume(x, last);
                    self.builder.read(x);
                }
            }
            Command::Free(n) => {
                if let Some(x) = self.pick(n, any) {
                    self.consume(x, true);
                    self.builder.free(x);
                }
            }
        }
    }
}

fn trace_of(commands: &[Command]) -> Trace {
    let mut program = Program::new();
    commands.iter().for_each(|command| program.run(command));
    program.builder.trace.check().expect("a random program is consistent");
    program.builder.trace
}

fn footprint(trace: &Trace) -> Footprint {
    Heap::flex().with_kept_per_thread(Bytes::ZERO).with_threads(2).footprint(trace)
}

/// Turns every last use by a call into a use and a free after the call.
fn held_longer(trace: &Trace) -> Trace {
    let mut held = trace.clone();
    held.steps = trace
        .steps
        .iter()
        .flat_map(|step| match step {
            Step::Call(call) => {
                let mut call = call.clone();
                let freed: Vec<_> = call
                    .inputs
                    .iter()
                    .filter(|input| input.last)
                    .map(|input| input.tensor)
                    .collect();
                call.inputs.iter_mut().for_each(|input| input.last = false);
                std::iter::once(Step::Call(call)).chain(freed.into_iter().map(Step::Free)).collect()
            }
            step => vec![step.clone()],
        })
        .collect();
    held
}

proptest! {
    #[test]
    fn the_peak_is_the_maximum_of_the_timeline(commands in commands(true)) {
        let trace = trace_of(&commands);
        let footprint = footprint(&trace);
        prop_assert_eq!(footprint.timeline.len(), trace.steps.len());
        for moment in &footprint.timeline {
            prop_assert!(moment.live <= moment.peak);
            prop_assert!(moment.peak <= footprint.peak);
        }
        let highest = footprint.timeline.iter().map(|moment| moment.peak).max().unwrap_or_default();
        if !footprint.timeline.is_empty() {
            prop_assert_eq!(highest, footprint.peak);
            prop_assert_eq!(footprint.timeline[footprint.at.0 as usize].peak, footprint.peak);
        }
    }

    #[test]
    fn the_categories_sum_to_the_peak(commands in commands(true)) {
        let footprint = footprint(&trace_of(&commands));
        prop_assert_eq!(footprint.categories.total(), footprint.peak);
    }

    #[test]
    fn survivors_fit_into_what_is_alive(commands in commands(false)) {
        let trace = trace_of(&commands);
        let footprint = footprint(&trace);
        let survivors: Bytes =
            trace.survivors().into_iter().map(|tensor| trace.tensor(tensor).bytes()).sum();
        let live = footprint.timeline.last().map_or(footprint.baseline, |moment| moment.live);
        prop_assert_eq!(survivors, live, "without views, what survives is what is alive");
        prop_assert!(footprint.peak >= survivors);
    }

    #[test]
    fn views_share_but_never_lose_memory(commands in commands(true)) {
        let trace = trace_of(&commands);
        let footprint = footprint(&trace);
        let largest = trace.survivors().into_iter().map(|tensor| trace.tensor(tensor).bytes()).max();
        let live = footprint.timeline.last().map_or(footprint.baseline, |moment| moment.live);
        prop_assert!(live >= largest.unwrap_or_default());
    }

    #[test]
    fn the_order_of_frees_does_not_matter(commands in commands(true), by in 0..8_usize) {
        let mut trace = trace_of(&commands);
        let mut survivors = trace.survivors();
        let before = trace.steps.len();
        trace.steps.extend(survivors.iter().copied().map(Step::Free));
        let one = footprint(&trace);
        let count = survivors.len();
        survivors.rotate_left(by.min(count));
        trace.steps.truncate(before);
        trace.steps.extend(survivors.into_iter().map(Step::Free));
        let other = footprint(&trace);
        prop_assert_eq!(one.peak, other.peak);
        prop_assert_eq!(one.timeline.last().map(|moment| moment.live),
            other.timeline.last().map(|moment| moment.live));
        prop_assert!(other.timeline.last().is_none_or(|moment| moment.live == Bytes::ZERO));
    }

    // Does not hold with views: what is written in place through the view of a part keeps the whole
    // buffer, whereas a copy would have released it.
    #[test]
    fn holding_tensors_longer_never_helps(commands in commands(false)) {
        let trace = trace_of(&commands);
        prop_assert!(footprint(&held_longer(&trace)).peak >= footprint(&trace).peak);
    }

    #[test]
    fn more_threads_never_need_less(commands in commands(true)) {
        let trace = trace_of(&commands);
        let few = Heap::flex().with_kept_per_thread(Bytes::ZERO).with_threads(1).footprint(&trace);
        let many = Heap::flex().with_kept_per_thread(Bytes::ZERO).with_threads(64).footprint(&trace);
        prop_assert!(few.peak <= many.peak);
    }
}
