//! What a step holds from operation to operation: the numbers behind every picture.

use std::collections::BTreeMap;

use firebox_trace::{
    Bytes, Category, Footprint, Label, Mark, Modules, OpIndex, Origin, Step, TensorIndex, Trace,
};
use serde::Serialize;

/// How many modules are drawn by themselves.
const MODULES: usize = 12;

/// The name for what belongs to no module that is drawn.
const OTHER: &str = "other";

/// The course of a trace.
#[derive(Debug)]
pub struct Story {
    /// The name of each step.
    pub names: Vec<String>,
    /// The module of each step.
    pub of_steps: Vec<Option<String>>,
    /// Bytes of pages, or what is allocated where there are no pages, at each step.
    pub reserved: Vec<u64>,
    /// Bytes of tensors at each step. Where operations are fused, a GPU writes fewer of them, so
    /// the sum may exceed the pages.
    pub live: Vec<u64>,
    /// Bytes of tensors at each step, by what they are for.
    pub categories: Vec<(String, Vec<u64>)>,
    /// The same bytes by module, the largest at the peak first.
    pub modules: Vec<(String, Vec<u64>)>,
    /// Moments of training.
    pub marks: Vec<(usize, String)>,
    /// The step at the peak.
    pub peak_at: usize,
    /// What is alive there, largest first.
    pub tensors: Vec<Held>,
    /// All buffers, each with the first tensor on it, in the order in which they are made.
    pub buffers: Vec<Held>,
}

/// A tensor, with its views.
#[derive(Clone, Debug, Serialize)]
pub struct Held {
    /// The path of a parameter, or the number of the tensor.
    pub name: String,
    /// The operation that makes it. Empty if it existed before.
    pub op: String,
    /// Its dimensions.
    pub shape: Vec<usize>,
    /// Its element type.
    pub dtype: String,
    /// Its bytes.
    pub bytes: u64,
    /// What it is for.
    pub category: &'static str,
    /// The module it belongs to. Empty if to none.
    pub module: String,
    /// The step that makes it. `None` if it existed before.
    pub made: Option<usize>,
    /// The step after which it and all its views have ended. `None` if it stays.
    pub freed: Option<usize>,
}

/// A buffer: a tensor and its views.
struct Buffer {
    bytes: u64,
    category: Category,
    module: Option<String>,
    /// How many of its tensors are alive.
    alive: u32,
    made: Option<usize>,
    freed: Option<usize>,
}

impl Story {
    /// The course of `trace`. `bytes` says how many bytes a tensor takes on the device.
    pub fn of(trace: &Trace, footprint: &Footprint, bytes: impl Fn(TensorIndex) -> Bytes) -> Self {
        let modules = Modules::of(trace);
        let (buffers, sums) = follow(trace, &modules, bytes);
        let peak_at = footprint.at.0 as usize;
        let (categories, by_module) = sums.end();
        // A device knows what is in use only where its queue is empty.
        let live = sum(&categories, trace.steps.len());
        let at_peak = |series: &[u64]| series.get(peak_at).copied().unwrap_or_default();
        let timeline = &footprint.timeline;
        let buffers = held(trace, &buffers);
        Self {
            names: trace.steps.iter().map(|step| step.name().to_owned()).collect(),
            of_steps: (0..trace.steps.len() as u32)
                .map(|at| modules.step(OpIndex(at)).map(str::to_owned))
                .collect(),
            reserved: timeline.iter().map(|moment| moment.peak.get()).collect(),
            live,
            categories: categories
                .into_iter()
                .map(|(of, series)| (of.to_string(), series))
                .collect(),
            modules: largest(by_module, at_peak),
            marks: marks(trace),
            peak_at,
            tensors: at(&buffers, peak_at),
            buffers,
        }
    }
}

/// Follows all buffers from their first tensor to their last, and sums up what they hold.
fn follow(
    trace: &Trace,
    modules: &Modules,
    bytes: impl Fn(TensorIndex) -> Bytes,
) -> (BTreeMap<TensorIndex, Buffer>, Sums) {
    let roots = trace.buffers();
    let mut buffers: BTreeMap<TensorIndex, Buffer> = BTreeMap::new();
    for root in &roots {
        buffers.entry(*root).or_insert_with(|| Buffer {
            bytes: bytes(*root).get(),
            category: category(trace, *root),
            module: modules.tensor(*root).map(str::to_owned),
            alive: 0,
            made: None,
            freed: None,
        });
    }
    let mut sums = Sums::new(trace.steps.len());
    for tensor in trace.existing() {
        let buffer = buffers.get_mut(&roots[tensor.0 as usize]).expect("every root is known");
        buffer.begin(None, &mut sums);
    }
    for (at, step) in trace.steps.iter().enumerate() {
        let (ended, made) = step.deaths_and_births();
        for tensor in made {
            let buffer = buffers.get_mut(&roots[tensor.0 as usize]).expect("every root is known");
            buffer.begin(Some(at), &mut sums);
        }
        for tensor in ended {
            let buffer = buffers.get_mut(&roots[tensor.0 as usize]).expect("every root is known");
            buffer.end(at, &mut sums);
        }
    }
    (buffers, sums)
}

impl Buffer {
    /// One of its tensors begins, made by this step.
    fn begin(&mut self, made: Option<usize>, sums: &mut Sums) {
        self.alive += 1;
        if self.alive == 1 {
            self.made = made;
            sums.add(made.unwrap_or(0), self, true);
        }
    }

    /// One of its tensors ends after this step.
    fn end(&mut self, at: usize, sums: &mut Sums) {
        self.alive = self.alive.saturating_sub(1);
        if self.alive == 0 {
            self.freed = Some(at);
            sums.add(at + 1, self, false);
        }
    }
}

/// Sums over time, kept as changes.
struct Sums {
    steps: usize,
    categories: BTreeMap<Category, Vec<i64>>,
    modules: BTreeMap<Option<String>, Vec<i64>>,
}

impl Sums {
    fn new(steps: usize) -> Self {
        Self { steps, categories: BTreeMap::new(), modules: BTreeMap::new() }
    }

    fn add(&mut self, at: usize, buffer: &Buffer, begins: bool) {
        let change = if begins { buffer.bytes as i64 } else { -(buffer.bytes as i64) };
        let changes = || vec![0; self.steps + 1];
        self.categories.entry(buffer.category).or_insert_with(changes)[at] += change;
        let of_module = self.modules.entry(buffer.module.clone());
        of_module.or_insert_with(changes)[at] += change;
    }

    #[expect(clippy::type_complexity, reason = "two lists of named series")]
    fn end(self) -> (Vec<(Category, Vec<u64>)>, Vec<(Option<String>, Vec<u64>)>) {
        let sums = |changes: Vec<i64>| {
            let mut sum = 0;
            let sums = changes.into_iter().take(self.steps).map(move |change| {
                sum += change;
                sum.max(0) as u64
            });
            sums.collect::<Vec<u64>>()
        };
        let categories = self.categories.into_iter().map(|(of, changes)| (of, sums(changes)));
        let modules = self.modules.into_iter().map(|(of, changes)| (of, sums(changes)));
        (categories.collect(), modules.collect())
    }
}

/// The sum of all categories at each step.
fn sum(categories: &[(Category, Vec<u64>)], steps: usize) -> Vec<u64> {
    let at = |step: usize| categories.iter().map(|(_, series)| series[step]).sum();
    (0..steps).map(at).collect()
}

/// The modules that hold most at the peak by name, and all others together.
fn largest(
    mut modules: Vec<(Option<String>, Vec<u64>)>,
    at_peak: impl Fn(&[u64]) -> u64,
) -> Vec<(String, Vec<u64>)> {
    modules.sort_by_key(|(of, series)| (of.is_none(), std::cmp::Reverse(at_peak(series))));
    let mut named = Vec::new();
    let mut other: Vec<u64> = Vec::new();
    for (of, series) in modules {
        match of {
            Some(name) if named.len() < MODULES => named.push((name, series)),
            _ => {
                other.resize(series.len(), 0);
                other.iter_mut().zip(series).for_each(|(sum, bytes)| *sum += bytes);
            }
        }
    }
    if !other.is_empty() {
        named.push((OTHER.to_owned(), other));
    }
    named
}

/// Micro-steps, numbered in their iteration, optimizer steps and ends of iterations.
fn marks(trace: &Trace) -> Vec<(usize, String)> {
    let mut marks = Vec::new();
    let mut number = 0;
    for (at, step) in trace.steps.iter().enumerate() {
        let Step::Mark(mark) = step else { continue };
        let name = match mark {
            Mark::MicroStep => {
                number += 1;
                format!("micro-step {number}")
            }
            Mark::MicroStepEnd(more) if *more > 0 => format!("{more} more like it"),
            Mark::OptimizerStep => "optimizer step".to_owned(),
            Mark::IterationEnd => {
                number = 0;
                "end of iteration".to_owned()
            }
            _ => continue,
        };
        marks.push((at, name));
    }
    marks
}

/// What a tensor is for. Tensors without a label are results, and count as activations.
fn category(trace: &Trace, tensor: TensorIndex) -> Category {
    let info = trace.tensor(tensor);
    match (&info.label, info.origin) {
        (Some(label), _) => label.category,
        (None, Origin::Existing) => Category::Input,
        (None, Origin::Made(at)) => match &trace.steps[at.0 as usize] {
            Step::Upload { .. } => Category::Input,
            _ => Category::Activation,
        },
    }
}

/// What is alive at a step, largest first.
fn at(buffers: &[Held], step: usize) -> Vec<Held> {
    let is_alive = |held: &&Held| {
        held.made.is_none_or(|made| made <= step)
            && held.freed.is_none_or(|freed| freed >= step)
            && held.bytes > 0
    };
    let mut alive: Vec<Held> = buffers.iter().filter(is_alive).cloned().collect();
    alive.sort_by_key(|held| std::cmp::Reverse(held.bytes));
    alive
}

fn held(trace: &Trace, buffers: &BTreeMap<TensorIndex, Buffer>) -> Vec<Held> {
    let held = buffers.iter().map(|(tensor, buffer)| {
        let info = trace.tensor(*tensor);
        let op = buffer.made.map_or("", |made| trace.steps[made].name());
        let name = match info.label.as_deref() {
            Some(Label { name, .. }) if !name.is_empty() => name.clone(),
            _ => tensor.to_string(),
        };
        Held {
            name,
            op: op.to_owned(),
            shape: info.shape.to_vec(),
            dtype: format!("{:?}", info.dtype),
            bytes: buffer.bytes,
            category: buffer.category.name(),
            module: buffer.module.clone().unwrap_or_default(),
            made: buffer.made,
            freed: buffer.freed,
        }
    });
    let mut held: Vec<Held> = held.collect();
    held.sort_by_key(|held| held.made);
    held
}
