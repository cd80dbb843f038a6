//! The values a recorded program works on, and its instructions.

use burn_backend::Backend;
use firebox_trace::{TensorIndex, Use};

use crate::kind::Value;
use crate::record::draws::Generator;

/// Runs one call on the backend.
pub(crate) type Run<B> = Box<dyn FnOnce(&mut Values<B>) + Send>;

/// A step that a session has yet to perform on the backend.
pub(crate) enum Instruction<B: Backend> {
    Run(Run<B>),
    Free(TensorIndex),
}

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

    pub(crate) fn store(&mut self, tensor: TensorIndex, value: Value<B>) {
        self.values[tensor.0 as usize] = Some(Box::new(value));
    }
}

/// Appends to a list that may be the largest part of a recording. The list grows by a quarter,
/// because doubling takes three times its size.
pub(crate) fn push<T>(list: &mut Vec<T>, item: T) {
    if list.len() == list.capacity() {
        list.reserve_exact((list.len() / 4).max(64));
    }
    list.push(item);
}
