//! The footprint: the memory that a trace needs, and the trait of the models that predict it.
//!
//! A [`MemoryModel`] reads a [`Trace`] and writes a [`Footprint`]. The planner compares footprints
//! with a budget, and does not know which model made them.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Bytes, Category, OpIndex, Trace};

/// What a [`MemoryModel`] is asked.
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    /// The trace that runs.
    pub trace: &'a Trace,
    /// Above this peak, how much more is needed does not matter: a slow model may stop there, and
    /// answer with less than what is needed, or not begin, and answer with a
    /// [lower bound](Estimate::LowerBound). Default: [`Bytes::MAX`].
    pub enough: Bytes,
}

impl<'a> Question<'a> {
    /// The memory that `trace` needs in a process that has run nothing before.
    pub fn new(trace: &'a Trace) -> Self {
        Self { trace, enough: Bytes::MAX }
    }
}

/// Predicts the memory that running a trace needs.
///
/// The same question always has the same answer. A model holds no device memory, but may keep what
/// it computed, or what a tuner has on disk. It may be asked from several threads at once.
///
/// ```
/// use firebox_trace::{Footprint, MemoryModel, Question, TensorInfo};
///
/// /// Takes every tensor to be alive all the time.
/// struct Everything;
///
/// impl MemoryModel for Everything {
///     fn name(&self) -> &str {
///         "everything"
///     }
///
///     fn answer(&self, question: &Question<'_>) -> Footprint {
///         let peak = question.trace.tensors.iter().map(TensorInfo::bytes).sum();
///         Footprint { peak, ..Footprint::default() }
///     }
/// }
/// ```
pub trait MemoryModel: Send + Sync {
    /// The name of the model, such as `heap (flex)`, for messages and tables.
    fn name(&self) -> &str;

    /// The memory that the question is about, and how sure the model is of it.
    ///
    /// # Panics
    ///
    /// If a trace contradicts itself; [`Trace::check`] says how.
    fn answer(&self, question: &Question<'_>) -> Footprint;

    /// The memory that running `trace` needs in a process that has run nothing before.
    ///
    /// # Panics
    ///
    /// As [`answer`](Self::answer).
    fn footprint(&self, trace: &Trace) -> Footprint {
        self.answer(&Question::new(trace))
    }

    /// What running `trace` certainly needs, also if tensors are recomputed instead of kept.
    /// Found without running it. Default: the tensors that existed before.
    fn at_least(&self, trace: &Trace) -> Bytes {
        trace.existing().map(|tensor| trace.tensor(tensor).bytes()).sum()
    }

    /// Whether the memory is the host's. If so, what a program holds apart from its tensors also
    /// counts. Default: no.
    fn is_on_host(&self) -> bool {
        false
    }

    /// Whether the allocator keeps the pages that it has opened until they are given back.
    /// Default: yes if the memory is a device's.
    fn keeps_pages(&self) -> bool {
        !self.is_on_host()
    }
}

/// How sure a model is of a footprint, from best to worst.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Estimate {
    /// Every allocation of the run is known. The run needs these bytes, plus what the allocator
    /// adds.
    #[default]
    Exact,
    /// A run may need less, for example because threads happened not to work at the same time.
    /// Training runs on Flex were found to need up to a fiftieth more.
    UpperBound,
    /// The model guesses. A run may need more or less.
    Heuristic,
    /// No run needs less. What it needs was not computed, because this alone is too much.
    LowerBound,
}

impl fmt::Display for Estimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Exact => "exact",
            Self::UpperBound => "upper bound",
            Self::Heuristic => "heuristic",
            Self::LowerBound => "lower bound",
        })
    }
}

/// The memory at one step of a trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moment {
    /// What is allocated when the step is over.
    pub live: Bytes,
    /// The most that is allocated at any moment of the step, including its begin and end.
    pub peak: Bytes,
}

/// Bytes per [`Category`].
///
/// ```
/// use firebox_trace::{Bytes, Category, CategoryBytes};
/// let mut held = CategoryBytes::default();
/// held.add(Category::Gradient, Bytes::mib(3));
/// assert_eq!(held.get(Category::Gradient), Bytes::mib(3));
/// assert_eq!(held.total(), Bytes::mib(3));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CategoryBytes([Bytes; Category::ALL.len()]);

impl CategoryBytes {
    /// The bytes of `category`.
    pub fn get(&self, category: Category) -> Bytes {
        self.0[category as usize]
    }

    /// Adds `bytes` to `category`.
    pub fn add(&mut self, category: Category, bytes: Bytes) {
        self.0[category as usize] += bytes;
    }

    /// The categories with their bytes, in the order of [`Category::ALL`].
    pub fn iter(&self) -> impl Iterator<Item = (Category, Bytes)> {
        Category::ALL.into_iter().map(|category| (category, self.get(category)))
    }

    /// The sum over all categories.
    pub fn total(&self) -> Bytes {
        self.0.iter().copied().sum()
    }
}

/// The memory that running a trace needs.
///
/// Counts the elements of tensors and the workspace of operations. Excludes what the allocator adds
/// to a block, the few hundred bytes of shape and reference counts of each tensor, code, stacks and
/// thread pools. If [`paging`](Self::paging) is set, the peak counts whole pages.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Footprint {
    /// The most that is allocated at any moment of the run, including [`baseline`](Self::baseline).
    pub peak: Bytes,
    /// The step in which the peak is first reached. Also step zero if nothing exceeds the state
    /// before it.
    pub at: OpIndex,
    /// The name of the call at the peak, such as `conv2d`. If the step is not a call: `upload`,
    /// `free`, `read` or `mark`. Empty for a trace without steps.
    pub op: String,
    /// The bytes of the tensors that existed before the recording.
    pub baseline: Bytes,
    /// The part of [`peak`](Self::peak) that a second run in the same process does not need again:
    /// what the backend's threads keep for good once they have worked, such as the blocks of matrix
    /// products.
    #[serde(default)]
    pub kept: Bytes,
    /// What these threads have kept when the run is over. Another run in the same process has it in
    /// addition to its own needs.
    #[serde(default)]
    pub stays: Bytes,
    /// The bytes at the peak, by what they are for. Sums to [`peak`](Self::peak).
    pub categories: CategoryBytes,
    /// The memory at each step, indexed by [`OpIndex`].
    pub timeline: Vec<Moment>,
    /// How sure the model is.
    pub estimate: Estimate,
    /// The names of the operations for which the model has no rule, each once, in order of first
    /// appearance. On a heap, their outputs count as fresh memory, and their inputs and outputs
    /// count once more as workspace.
    pub unaccounted: Vec<String>,
    /// How the memory is cut into pages, if the allocator reserves whole pages and the peak counts
    /// them.
    #[serde(default)]
    pub paging: Option<Paging>,
}

/// The pages that an allocator has reserved at the peak.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Paging {
    /// The bytes of all pages.
    pub reserved: Bytes,
    /// The maximum bytes of buffers on the pages at once.
    pub in_use: Bytes,
    /// The number of pages of each size.
    pub pages: BTreeMap<Bytes, usize>,
    /// The largest buffer of the run.
    pub largest_buffer: Bytes,
    /// The largest buffer that the device can hold.
    pub largest_page: Bytes,
    /// Whether kernels must first be chosen by trying each. Of the candidates, the one that takes
    /// the most memory is counted.
    #[serde(default)]
    pub tunes: bool,
    /// The pages to request, if pages have the sizes that a plan sets.
    #[serde(default)]
    pub pool: Option<PoolPages>,
}

/// The pages of a pool that has a page for each kind of buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolPages {
    /// For what outlives steps: parameters, the optimizer's state.
    pub lasting: Bytes,
    /// For what micro-steps make.
    pub step: Bytes,
    /// For small buffers.
    pub small: Bytes,
    /// For what other threads make.
    pub beside: Bytes,
    /// What the runtime below takes for itself.
    pub below: Bytes,
    /// Buffers of micro-steps with at least this many bytes fill their page from its start, smaller
    /// ones from its end. Zero if all take the gap that fits best.
    pub step_from: Bytes,
}

impl PoolPages {
    /// The total bytes.
    pub fn total(&self) -> Bytes {
        self.lasting + self.step + self.small + self.beside + self.below
    }

    /// The larger of each size. Keeps [`step_from`](Self::step_from).
    pub fn larger(&self, other: &Self) -> Self {
        Self {
            lasting: self.lasting.max(other.lasting),
            step: self.step.max(other.step),
            small: self.small.max(other.small),
            beside: self.beside.max(other.beside),
            below: self.below.max(other.below),
            step_from: self.step_from,
        }
    }
}

impl Paging {
    /// Whether the run can never work on the device, however much memory is free, because a buffer
    /// is larger than any page. [`peak`](Footprint::peak) is then [`Bytes::MAX`].
    pub fn is_refused(&self) -> bool {
        self.largest_buffer > self.largest_page
    }

    /// The share of the pages that no buffer uses, between 0 and 1.
    ///
    /// ```
    /// use firebox_trace::{Bytes, Paging};
    /// let (reserved, in_use) = (Bytes::mib(40), Bytes::mib(30));
    /// assert_eq!(Paging { reserved, in_use, ..Paging::default() }.fragmentation(), 0.25);
    /// assert_eq!(Paging::default().fragmentation(), 0.0);
    /// ```
    pub fn fragmentation(&self) -> f64 {
        if self.reserved == Bytes::ZERO {
            return 0.0;
        }
        (self.reserved - self.in_use).ratio(self.reserved)
    }
}

impl fmt::Display for Footprint {
    /// `13.02 MiB at matmul (exact): parameters 4.00 MiB, gradients 4.00 MiB, ...`. Categories
    /// without bytes are left out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { peak, op, estimate, .. } = self;
        let at = if op.is_empty() { String::new() } else { format!(" at {op}") };
        write!(f, "{peak}{at} ({estimate})")?;
        let held = self.categories.iter().filter(|(_, bytes)| *bytes > Bytes::ZERO);
        for (at, (category, bytes)) in held.enumerate() {
            write!(f, "{} {category} {bytes}", if at == 0 { ":" } else { "," })?;
        }
        Ok(())
    }
}

impl Footprint {
    /// What the run needs on top of what existed before it, in a process that has run something
    /// similar: [`peak`](Self::peak) minus [`baseline`](Self::baseline) and [`kept`](Self::kept).
    pub fn growth(&self) -> Bytes {
        self.peak - self.baseline - self.kept
    }
}
