//! The values a recorded program works on, and its instructions.

use burn_backend::{Backend, TensorData};
use firebox_trace::{OpIndex, Step, TensorIndex, Use};
use rustc_hash::FxHashMap;

use crate::kind::Value;
use crate::record::draws::Generator;
use crate::record::inputs::of_data;

/// Runs a call on the backend, as often as asked.
pub(crate) type Body<B> = Box<dyn Fn(&mut Frame<'_, B>) + Send>;

/// Work that is done once.
pub(crate) type Once<B> = Box<dyn FnOnce(&mut Frame<'_, B>) + Send>;

/// What a session has yet to do on the backend. The ends of tensors are in the trace alone.
pub(crate) enum Instruction<B: Backend> {
    /// A call of burn's.
    Call(Body<B>),
    /// An upload, a call of the user's own, or an effect without a step, such as seeding.
    Once(Once<B>),
}

impl<B: Backend> Instruction<B> {
    /// Does the work for the last time.
    pub(crate) fn finish(self, frame: &mut Frame<'_, B>) {
        match self {
            Self::Call(body) => body(frame),
            Self::Once(run) => run(frame),
        }
    }
}

/// What a step works on while it runs. Its tensors have the positions that they have in the step,
/// so that a call can run again on other tensors.
pub struct Frame<'a, B: Backend> {
    values: &'a mut Values<B>,
    inputs: &'a [Use],
    outputs: &'a [TensorIndex],
}

impl<'a, B: Backend> Frame<'a, B> {
    /// The frame of a step.
    pub(crate) fn of(step: Option<&'a Step>, values: &'a mut Values<B>) -> Self {
        let (inputs, outputs) =
            step.map(|step| (step.inputs(), step.outputs())).unwrap_or_default();
        Self { values, inputs, outputs }
    }

    /// The value of an input. The last use takes it out, so that the backend finds itself the only
    /// owner.
    pub(crate) fn fetch(&mut self, input: u32) -> Value<B> {
        self.values.fetch(self.inputs[input as usize])
    }

    pub(crate) fn store(&mut self, output: u32, value: Value<B>) {
        self.values.store(self.outputs[output as usize], value);
    }

    /// The session's own random generator. `None`: the backend's is used.
    pub(crate) fn substitute(&mut self) -> Option<&mut Generator> {
        self.values.substitute.as_mut()
    }
}

/// The numbers that take the place of results of recorded steps, by their position among these.
pub(crate) type Given = FxHashMap<OpIndex, Vec<(usize, TensorData)>>;

/// The backend's tensors that the program works on, by their index in the trace.
pub struct Values<B: Backend> {
    /// Boxed, because most are gone while the others are still in use.
    values: Vec<Option<Box<Value<B>>>>,
    /// The session's own random generator. `None`: the backend's is used.
    pub(crate) substitute: Option<Generator>,
}

impl<B: Backend> Values<B> {
    /// Room for `tensors` values.
    pub(crate) fn of(tensors: usize) -> Self {
        Self { values: (0..tensors).map(|_| None).collect(), substitute: None }
    }

    /// No values yet. `substitute` is the session's own random generator, if any.
    pub(crate) fn drawing_from(substitute: Option<Generator>) -> Self {
        Self { values: Vec::new(), substitute }
    }

    /// Adds room for one more value.
    pub(crate) fn add(&mut self) {
        push(&mut self.values, None);
    }

    /// Makes room for `tensors` values.
    pub(crate) fn resize(&mut self, tensors: usize) {
        self.values.resize_with(tensors, || None);
    }

    /// The value of a tensor. The last use takes it out, so that the backend finds itself the only
    /// owner.
    pub(crate) fn fetch(&mut self, used: Use) -> Value<B> {
        let value = &mut self.values[used.tensor.0 as usize];
        match used.last {
            true => value.take().map(|value| *value),
            false => value.as_deref().cloned(),
        }
        .expect("the program makes a tensor before it uses it")
    }

    /// The value of a tensor, if it is there.
    pub(crate) fn get(&self, tensor: TensorIndex) -> Option<&Value<B>> {
        self.values[tensor.0 as usize].as_deref()
    }

    /// Removes a value and returns it if it was there.
    pub(crate) fn remove(&mut self, tensor: TensorIndex) -> Option<Box<Value<B>>> {
        self.values[tensor.0 as usize].take()
    }

    /// Puts what is given in the place of what a step has made, which is freed before.
    pub(crate) fn give(&mut self, step: &Step, given: Vec<(usize, TensorData)>) {
        for (output, data) in given {
            let Some(made) = step.outputs().get(output) else { continue };
            let Some(value) = self.remove(*made) else { continue };
            let (device, make) = of_data(&value).expect("no quantized tensor is given");
            drop(value);
            self.store(*made, make(data, &device));
        }
    }

    pub(crate) fn store(&mut self, tensor: TensorIndex, value: Value<B>) {
        self.values[tensor.0 as usize] = Some(Box::new(value));
    }
}

/// Appends to a list that may be the largest part of a recording, or have one element. A long list
/// grows by a quarter, because doubling takes three times its size.
pub(crate) fn push<T>(list: &mut Vec<T>, item: T) {
    if list.len() == list.capacity() {
        let length = list.len();
        list.reserve_exact((length / 4).max(length.clamp(4, 64)));
    }
    list.push(item);
}
