//! The text form of a trace: one line per step, stable, for people and for snapshot tests.

use std::fmt;

use crate::{Call, Footprint, Step, TensorIndex, Trace, Use};

impl fmt::Display for Trace {
    /// Writes the tensors that existed before the recording, then the steps.
    ///
    /// A line names the step, the method, its arguments and its results. `!` marks the last use of
    /// a tensor. A label follows in parentheses if the recorder gave one, and then a note if a
    /// loader thread requested the tensor.
    ///
    /// ```
    /// use burn_std::{DType, Shape};
    /// use firebox_trace::{
    ///     Category, Label, Origin, Step, TensorIndex, TensorInfo, TensorType, Trace, Use,
    /// };
    ///
    /// let ty = TensorType { shape: Shape::new([2, 3]), dtype: DType::F32 };
    /// let mut weight = TensorInfo::new(ty.into(), Origin::Existing);
    /// let label = Label { category: Category::Parameter, name: "linear.weight".into() };
    /// weight.label = Some(label.into());
    /// let read = Step::Read(Use { tensor: TensorIndex(0), last: true });
    /// let trace = Trace { tensors: vec![weight], steps: vec![read], ..Trace::default() };
    /// assert_eq!(trace.to_string(), "%0 [2, 3] f32 (parameters: linear.weight)\n#0 read %0!\n");
    /// ```
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for tensor in self.existing() {
            writeln!(f, "{}", Described { trace: self, tensor })?;
        }
        for (at, step) in self.iter() {
            writeln!(f, "{at} {}", Line { trace: self, step })?;
        }
        Ok(())
    }
}

impl Trace {
    /// The text form with the memory at each step: what is live after the step, and the most that
    /// is allocated during it. The step of the peak is marked.
    ///
    /// If `footprint` is that of another trace and lacks a step, the columns of that step are
    /// empty.
    ///
    /// ```
    /// use firebox_trace::{Footprint, Moment, Step, Trace};
    /// let trace = Trace { steps: vec![Step::Mark("epoch 1".into())], ..Trace::default() };
    /// let footprint = Footprint { timeline: vec![Moment::default()], ..Footprint::default() };
    /// assert_eq!(
    ///     trace.dump(&footprint).to_string(),
    ///     "      live |       peak |\n       0 B |        0 B | #0 mark epoch 1 <- peak\n",
    /// );
    /// ```
    pub fn dump<'a>(&'a self, footprint: &'a Footprint) -> impl fmt::Display + 'a {
        Annotated { trace: self, footprint }
    }
}

/// A trace with the memory at each step.
struct Annotated<'a> {
    trace: &'a Trace,
    footprint: &'a Footprint,
}

impl fmt::Display for Annotated<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { trace, footprint } = self;
        writeln!(f, "{:>10} | {:>10} |", "live", "peak")?;
        for tensor in trace.existing() {
            writeln!(f, "{:>10} | {:>10} | {}", "", "", Described { trace, tensor })?;
        }
        for (at, step) in trace.iter() {
            match footprint.timeline.get(at.0 as usize) {
                Some(moment) => write!(f, "{:>10} | {:>10} |", moment.live, moment.peak)?,
                None => write!(f, "{:>10} | {:>10} |", "", "")?,
            }
            let peak = if at == footprint.at { " <- peak" } else { "" };
            writeln!(f, " {at} {}{peak}", Line { trace, step })?;
        }
        Ok(())
    }
}

/// One step.
struct Line<'a> {
    trace: &'a Trace,
    step: &'a Step,
}

impl fmt::Display for Line<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let described = |tensor| Described { trace: self.trace, tensor };
        match self.step {
            Step::Call(call) => {
                let Call { name, inputs, outputs, .. } = &**call;
                write!(f, "{name}")?;
                for input in inputs {
                    write!(f, " {}", Argument(*input))?;
                }
                for (i, output) in outputs.iter().enumerate() {
                    write!(f, "{} {}", if i == 0 { " ->" } else { "," }, described(*output))?;
                }
                Ok(())
            }
            Step::Upload { output, host } => {
                write!(f, "upload {host} -> {}", described(*output))
            }
            Step::Free(tensor) => write!(f, "free {tensor}"),
            Step::Read(read) => write!(f, "read {}", Argument(*read)),
            Step::Mark(text) => write!(f, "mark {text}"),
        }
    }
}

/// A use of a tensor.
struct Argument(Use);

impl fmt::Display for Argument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.0.tensor, if self.0.last { "!" } else { "" })
    }
}

/// A tensor with its shape, element type and label.
struct Described<'a> {
    trace: &'a Trace,
    tensor: TensorIndex,
}

impl fmt::Display for Described<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let info = self.trace.tensor(self.tensor);
        write!(f, "{} {:?} {}", self.tensor, info.shape.as_slice(), info.dtype.name())?;
        match &info.label {
            Some(label) if label.name.is_empty() => write!(f, " ({})", label.category)?,
            Some(label) => write!(f, " ({}: {})", label.category, label.name)?,
            None => {}
        }
        f.write_str(if info.prepared { " (of a loader thread)" } else { "" })
    }
}
