//! The values that a recorded program works on, and its instructions.

use burn_backend::Backend;
use firebox_trace::{TensorIndex, Use};

use crate::draws::Generator;
use crate::kind::Value;
use crate::limits::push;

/// Runs one call on the backend.
pub(crate) type Run<B> = Box<dyn FnOnce(&mut Values<B>) + Send>;

/// What a session has yet to do on the backend, in order.
pub(crate) enum Instruction<B: Backend> {
    Run(Run<B>),
    Free(TensorIndex),
}

/// The tensors of the backend that the program works on, by their number in the trace.
pub struct Values<B: Backend> {
    /// Boxed: most are gone while the others are still in use.
    values: Vec<Option<Box<Value<B>>>>,
    /// Whether random numbers come from a generator of the session's own, so that the backend's is left alone.
    pub(crate) substitute: Option<Generator>,
}

impl<B: Backend> Values<B> {
    /// Room for so many.
    pub(crate) fn of(tensors: usize) -> Self {
        Self { values: (0..tensors).map(|_| None).collect(), substitute: None }
    }

    /// No tensors, and where random numbers come from.
    pub(crate) fn drawing_from(substitute: Option<Generator>) -> Self {
        Self { values: Vec::new(), substitute }
    }

    /// Makes room for one more.
    pub(crate) fn add(&mut self) {
        push(&mut self.values, None);
    }

    /// The value of a tensor; its last use takes it out, so that the backend finds itself the only owner.
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

    /// Lets a value go, and gives it if it was there.
    pub(crate) fn remove(&mut self, tensor: TensorIndex) -> Option<Box<Value<B>>> {
        self.values[tensor.0 as usize].take()
    }

    pub(crate) fn store(&mut self, tensor: TensorIndex, value: Value<B>) {
        self.values[tensor.0 as usize] = Some(Box::new(value));
    }
}
